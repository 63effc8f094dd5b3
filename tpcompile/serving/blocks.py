"""The blocks of an engine's KV cache: their reference counts, and contents that can be shared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tpcompile.serving.stock import Content, Stock, Tokens


class Blocks(Stock):
    """The blocks of a KV cache, of which some have known contents."""

    def __init__(
        self, count: int, size: int, lost: Callable[[Content], None] = lambda content: None
    ) -> None:
        """`lost` is called with contents that can no longer be found."""
        super().__init__(count, size)
        self._lost = lost
        self._by_hash: dict[int, Content] = {}
        """A hash is only a hint: the tokens are compared."""

    def find(self, tokens: Sequence[int], salt: Hashable) -> list[Content]:
        """Return the longest known run of blocks that begins with the first of these tokens.

        Contents with another salt are never found, so tenants learn nothing about each other.
        """
        contents: list[Content] = []
        parent: Content | None = None
        for first in range(0, len(tokens) - self.size + 1, self.size):
            block_tokens = tuple(tokens[first : first + self.size])
            content = self._by_hash.get(_key(parent, block_tokens, salt))
            if content is None or not _is(content, parent, block_tokens, salt):
                break
            contents.append(content)
            parent = content
        return contents

    def know(
        self,
        blocks: list[int],
        tokens: Sequence[int],
        first: int,
        salt: Hashable,
        merge: bool = False,
    ) -> None:
        """Record the contents of the blocks of a sequence from block `first` on.

        All of `tokens`, in full blocks, are in the blocks. If the same contents are known in
        another block, they are not recorded twice. With `merge`, the sequence then gets that block
        instead of its own, and later blocks are recorded too.
        """
        parent: Content | None = self._contents.get(blocks[first - 1]) if first else None
        if first and parent is None:
            return  # the previous block duplicates a known one
        for place in range(first, len(tokens) // self.size):
            block_tokens = tuple(tokens[place * self.size : (place + 1) * self.size])
            key = _key(parent, block_tokens, salt)
            known = self._by_hash.get(key)
            if merge and known is not None and _is(known, parent, block_tokens, salt):
                self.share((known.block,))
                self.release((blocks[place],))
                blocks[place], parent = known.block, known
                continue
            if known is not None or blocks[place] in self._contents:
                return
            content = Content(blocks[place], parent, block_tokens, salt)
            self._by_hash[key] = content
            self._keep(content.block, content)
            parent = content

    def content(self, block: int) -> Content | None:
        """Return the known contents of a block."""
        return self._contents.get(block)

    def _lose(self, content: Content) -> None:
        del self._by_hash[_key(content.parent, content.tokens, content.salt)]
        self._lost(content)


def _key(parent: Content | None, tokens: Tokens, salt: Hashable) -> int:
    return hash((id(parent), tokens, salt))


def _is(content: Content, parent: Content | None, tokens: Tokens, salt: Hashable) -> bool:
    return content.parent is parent and content.tokens == tokens and content.salt == salt
