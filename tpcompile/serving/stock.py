"""A fixed number of items that sequences hold, and that may be cached for their contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tpcompile.runtime.kv.blocks import BlockPool

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The contents of a block: its tokens, after those of the parent's block."""

    block: int
    parent: Content | None
    tokens: Tokens
    salt: Hashable


class Stock(ABC):
    """A fixed number of items, numbered from 0, of which some have known contents.

    Any number of sequences can hold an item. Known contents hold their item too, so that they stay
    available until a sequence needs it; the least recently used item is evicted first.
    """

    def __init__(self, count: int, size: int = 1) -> None:
        """`size` is the number of tokens in an item."""
        self.count, self.size = count, size
        self._pool = BlockPool(size, enough=count)
        self._contents: dict[int, Content] = {}
        """The contents of each item; for a state, those of the last block before it."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Items that only their contents hold, least recently used first."""

    @property
    def available(self) -> int:
        """The number of items that no sequence holds, including those with known contents."""
        return self._free + len(self._kept)

    @property
    def held(self) -> int:
        """The number of items in use by sequences."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """The number of items that no sequence holds, whose contents can still be shared."""
        return len(self._kept)

    @property
    def _free(self) -> int:
        return self.count - self._pool.used

    def take(self, count: int) -> list[int] | None:
        """Take `count` items; return None if fewer are available."""
        if count > self.available:
            return None
        for _ in range(count - self._free):
            self._forget(next(iter(self._kept)))
        return list(self._pool.take(count))

    def share(self, items: Sequence[int]) -> None:
        """Add a holder to items, which may be kept."""
        for item in items:
            self._kept.pop(item, None)
        self._pool.share(items)

    def release(self, items: Sequence[int]) -> None:
        """Remove a holder from the items of a sequence.

        Later items are useless without earlier ones, so they are evicted first.
        """
        self._pool.free(items)
        for item in reversed(items):
            if item in self._contents and not self.holders(item):
                self._kept[item] = None

    def holders(self, item: int) -> int:
        """Return the number of sequences that hold an item."""
        return self._pool.holders(item) - (item in self._contents)

    def _keep(self, item: int, content: Content) -> None:
        """Record the contents of an item, which stays available when no sequence holds it."""
        self._contents[item] = content
        self._pool.share((item,))

    def _forget(self, item: int) -> None:
        """Make an item available for other contents."""
        self._kept.pop(item, None)
        self._pool.free((item,))
        self._lose(self._contents.pop(item))

    @abstractmethod
    def _lose(self, content: Content) -> None:
        """Forget the place of contents."""
