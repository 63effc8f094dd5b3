"""Blocks of the KV cache and states: reference counts, and allocation as sequences grow.

A model has a pool, and so has each engine, which adds contents (`tpcompile.serving.blocks`).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A sequence: its blocks in order, the last of which may be partly full, and its length.

    With linear attention, it also has the state after its last token.
    """

    blocks: tuple[int, ...] = ()
    length: int = 0
    state: int | None = None


class BlockPool:
    """An allocator of block ids, each block `block` slots long; the data is on the ranks.

    Sequences may share a block; it is free again when the last sequence releases it. The methods
    are thread-safe. A caller that acts on a result must hold `lock` from the call to the action.
    """

    def __init__(
        self, block: int, enough: int | None = None, states: BlockPool | None = None
    ) -> None:
        self.block = block
        """The number of tokens in a block."""
        self.states = states
        """The pool of the states of linear attention, whose blocks are states."""
        self.lock = threading.RLock()
        self._enough = enough
        """The number of blocks for the model's limits; doubling does not skip past it."""
        self._taken = bytearray()
        """A byte per block, 0 if the block is free; `find` locates free runs."""
        self._holders: dict[int, int] = {}
        self._abandoned: deque[Sequence[Row]] = deque()

    @property
    def blocks(self) -> int:
        """The number of blocks that the ranks must have."""
        return len(self._taken)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of blocks, and of states, that the ranks must have."""
        return self.blocks, 0 if self.states is None else self.states.blocks

    @property
    def used(self) -> int:
        """The number of blocks that are not free."""
        with self.lock:
            self._collect()
            return len(self._holders)

    def holders(self, block: int) -> int:
        """Return the number of sequences that hold a block."""
        with self.lock:
            self._collect()
            return self._holders.get(block, 0)

    def take(self, count: int, after: int | None = None, exactly: bool = False) -> tuple[int, ...]:
        """Allocate `count` blocks: those directly after the block `after` if free, else the lowest.

        Prefer one run of consecutive blocks, since such a run is read in place. With `exactly`, the
        ranks get no more blocks than they need now.
        """
        with self.lock:
            self._collect()
            self._make_room(count, exactly)
            run = bytes(count)
            start = self._taken.find(run)
            if after is not None and self._taken[after + 1 : after + 1 + count] == run:
                start = after + 1
            if start >= 0:
                taken = tuple(range(start, start + count))
            else:
                free = (id for id, flag in enumerate(self._taken) if not flag)
                taken = tuple(id for id, _ in zip(free, range(count), strict=False))
            for id in taken:
                self._taken[id] = 1
                self._holders[id] = 1
            return taken

    def shrink_to(self, sizes: tuple[int, int]) -> None:
        """Drop free blocks and states beyond `sizes`, as ranks may have failed to allocate them."""
        blocks, states = sizes
        with self.lock:
            held = len(self._taken.rstrip(b"\0"))
            del self._taken[max(blocks, held) :]
            if self.states is not None:
                self.states.shrink_to((states, 0))

    def share(self, blocks: Iterable[int]) -> None:
        """Add one sequence to the holders of these blocks."""
        with self.lock:
            for id in blocks:
                self._holders[id] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove one sequence from the holders of these blocks."""
        with self.lock:
            for id in blocks:
                self._holders[id] -= 1
                if not self._holders[id]:
                    del self._holders[id]
                    self._taken[id] = 0

    def share_row(self, row: Row) -> None:
        """Add one sequence to the holders of the blocks and of the state of a row."""
        with self.lock:
            self.share(row.blocks)
            if self.states is not None and row.state is not None:
                self.states.share((row.state,))

    def free_row(self, row: Row) -> None:
        """Remove one sequence from the holders of the blocks and of the state of a row."""
        with self.lock:
            self.free(row.blocks)
            self.free_state(row)

    def free_state(self, row: Row) -> None:
        """Remove one sequence from the holders of the state of a row."""
        if self.states is not None and row.state is not None:
            self.states.free((row.state,))

    def abandon(self, rows: Sequence[Row]) -> None:
        """Free the blocks of rows; safe to call from a finaliser.

        A finaliser may run in any thread, during another call of the pool. So this only queues
        the rows, and the next call frees them.
        """
        self._abandoned.append(rows)

    def _collect(self) -> None:
        while self._abandoned:
            for row in self._abandoned.popleft():
                self.free_row(row)

    def _make_room(self, count: int, exactly: bool) -> None:
        """Grow to a power of two, so that the ranks, which copy their whole cache, seldom grow."""
        needed = len(self._holders) + count
        if needed <= self.blocks:
            return
        blocks = needed if exactly else 1 << (needed - 1).bit_length()
        if self._enough is not None and needed <= self._enough:
            blocks = min(blocks, self._enough)
        self._taken.extend(bytes(blocks - self.blocks))


@dataclass(frozen=True)
class Growth:
    """The rows with room for new tokens, and the changes of the pool."""

    rows: tuple[Row, ...]
    taken: tuple[int, ...]
    """The blocks to free if the growth is undone."""
    replaced: tuple[int, ...]
    """The blocks to free when the old rows are no longer needed."""
    copies: tuple[tuple[int, int], ...]
    """Pairs (source, target): a shared block is copied before it is written."""
    sizes: tuple[int, int]
    """The blocks and the states that the pool had before."""

    def undo(self, pool: BlockPool, before: Sequence[Row]) -> None:
        """Free what was taken: the step did not run."""
        pool.free(self.taken)
        self._free_states(pool, self.rows, before)
        pool.shrink_to(self.sizes)

    def finish(self, pool: BlockPool, before: Sequence[Row]) -> None:
        """Free what the rows `before` held and the new ones do not."""
        pool.free(self.replaced)
        self._free_states(pool, before, self.rows)

    def _free_states(self, pool: BlockPool, rows: Sequence[Row], remaining: Sequence[Row]) -> None:
        for row, other in zip(rows, remaining, strict=True):
            if row.state != other.state:
                pool.free_state(row)


def blocks_for(length: int, block: int) -> int:
    """Return the number of blocks that `length` tokens need."""
    return -(-length // block)


def grow(pool: BlockPool, rows: Sequence[Row], new: Sequence[int]) -> Growth:
    """Allocate room for `new[i]` more tokens in `rows[i]`."""
    with pool.lock:
        return _grow(pool, rows, new)


def _grow(pool: BlockPool, rows: Sequence[Row], new: Sequence[int]) -> Growth:
    sizes = pool.sizes
    grown = list(rows)
    taken: list[int] = []
    replaced: Counter[int] = Counter()
    copies = []
    # Of the rows that share a last block, the longest comes last and may write it in place, after
    # the end of all the others. So their tokens are still intact if the step fails.
    for index in sorted(range(len(rows)), key=lambda index: rows[index].length):
        row = rows[index]
        if not new[index]:
            continue
        length = row.length + new[index]
        blocks, last = row.blocks, row.blocks[-1] if row.length % pool.block else None
        if last is not None and pool.holders(last) - replaced[last] > 1:
            blocks = blocks[:-1]
        missing = blocks_for(length, pool.block) - len(blocks)
        fresh = pool.take(missing, after=blocks[-1] if blocks else None)
        if last is not None and len(blocks) < len(row.blocks):
            replaced[last] += 1
            copies.append((last, fresh[0]))
        taken += fresh
        state = pool.states.take(1)[0] if pool.states is not None else None
        grown[index] = Row(blocks + fresh, length, state)
    return Growth(tuple(grown), tuple(taken), tuple(replaced.elements()), tuple(copies), sizes)


def slots_of(before: Sequence[Row], after: Sequence[Row], block: int) -> torch.Tensor:
    """Return int64 [tokens]: the slots of the new tokens, row after row."""
    slots = [
        new.blocks[place // block] * block + place % block
        for old, new in zip(before, after, strict=True)
        for place in range(old.length, new.length)
    ]
    return torch.tensor(slots, dtype=torch.long)


def states_of(rows: Sequence[Row]) -> torch.Tensor:
    """Return int64 [rows]: the state of each row, 0 if it has none yet."""
    return torch.tensor([row.state or 0 for row in rows], dtype=torch.long)


def tables_of(rows: Sequence[Row]) -> torch.Tensor:
    """Return int64 [rows, blocks]: the blocks of each row, padded with -1."""
    longest = max((len(row.blocks) for row in rows), default=0)
    padded = [[*row.blocks, *[-1] * (longest - len(row.blocks))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
