"""The blocks of an engine's KV cache: who holds them, and which contents can be shared."""

from __future__ import annotations

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


class Blocks:
    """A fixed number of blocks, numbered from 0, of which some have known contents.

    Any number of sequences can hold a block. Known contents hold their block too, so that they stay
    available until a sequence needs the block; the least recently used block is evicted first.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        """The number of blocks, and the tokens in each."""
        self._pool = BlockPool(size, enough=count)
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks that only their contents hold, least recently used first."""
        self._contents: dict[int, Content] = {}
        """By block."""
        self._known: dict[int, Content] = {}
        """By hash. A hash is only a hint: the tokens are compared."""

    @property
    def available(self) -> int:
        """The number of blocks that no sequence holds, including those with known contents."""
        return self._free + len(self._kept)

    @property
    def held(self) -> int:
        """The number of blocks in use by sequences."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """The number of blocks that no sequence holds, whose contents can still be shared."""
        return len(self._kept)

    @property
    def _free(self) -> int:
        return self.count - self._pool.used

    def take(self, count: int) -> list[int] | None:
        """Take so many blocks, or none if fewer are available."""
        if count > self.available:
            return None
        for _ in range(count - self._free):
            self._forget(self._kept.popitem(last=False)[0])
        return list(self._pool.take(count))

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks, which may be kept."""
        for block in blocks:
            self._kept.pop(block, None)
        self._pool.share(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder from the blocks of a sequence.

        Later blocks are useless without earlier ones, so they count as used longer ago.
        """
        self._pool.free(blocks)
        for block in reversed(blocks):
            if block in self._contents and not self.holders(block):
                self._kept[block] = None

    def holders(self, block: int) -> int:
        """Return the number of sequences that hold a block."""
        return self._pool.holders(block) - (block in self._contents)

    def find(self, tokens: Sequence[int], salt: Hashable) -> list[Content]:
        """Return the longest known run of blocks that begins with the first of these tokens.

        Contents with another salt are never found, so tenants learn nothing of each other.
        """
        found: list[Content] = []
        parent: Content | None = None
        for first in range(0, len(tokens) - self.size + 1, self.size):
            own = tuple(tokens[first : first + self.size])
            content = self._known.get(_key(parent, own, salt))
            if content is None or not _is(content, parent, own, salt):
                break
            found.append(content)
            parent = content
        return found

    def know(
        self, blocks: Sequence[int], tokens: Sequence[int], first: int, salt: Hashable
    ) -> None:
        """Record the contents of the blocks of a sequence from block `first` on.

        All of `tokens`, in full blocks, are in the blocks. If the same contents are known in
        another block, they are not recorded twice.
        """
        parent: Content | None = self._contents.get(blocks[first - 1]) if first else None
        if first and parent is None:
            return  # the block before holds the same as a known one
        for place in range(first, len(tokens) // self.size):
            own = tuple(tokens[place * self.size : (place + 1) * self.size])
            key = _key(parent, own, salt)
            known = self._known.get(key)
            if known is not None or blocks[place] in self._contents:
                return
            content = Content(blocks[place], parent, own, salt)
            self._known[key] = self._contents[content.block] = content
            self._pool.share((content.block,))
            parent = content

    def _forget(self, block: int) -> None:
        self._pool.free((block,))
        content = self._contents.pop(block)
        del self._known[_key(content.parent, content.tokens, content.salt)]


def _key(parent: Content | None, tokens: Tokens, salt: Hashable) -> int:
    return hash((id(parent), tokens, salt))


def _is(content: Content, parent: Content | None, tokens: Tokens, salt: Hashable) -> bool:
    return content.parent is parent and content.tokens == tokens and content.salt == salt
