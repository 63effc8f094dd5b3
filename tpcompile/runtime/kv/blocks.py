"""The blocks of the KV cache: who holds which, and how sequences grow into free ones."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One sequence: its blocks in order, the last of them perhaps not full, and its tokens."""

    blocks: tuple[int, ...] = ()
    length: int = 0


class BlockPool:
    """Hands out the ids of blocks, each `block` slots long; only the ranks hold numbers.

    Sequences may hold a block together; it is free again when the last of them lets it go.
    Several threads may call at once; who asks and then acts on the answer holds `lock`.
    """

    def __init__(self, block: int, enough: int | None = None) -> None:
        self.block = block
        """How many tokens a block holds."""
        self.lock = threading.RLock()
        self._enough = enough
        """Room for all that the model is meant to hold at once: no doubling jumps over it."""
        self._taken = bytearray()
        """Per block that the ranks have: 0 where it is free. Runs are found with `find`."""
        self._holders: dict[int, int] = {}
        self._abandoned: deque[Sequence[Row]] = deque()

    @property
    def blocks(self) -> int:
        """How many blocks the ranks must have."""
        return len(self._taken)

    @property
    def used(self) -> int:
        """How many blocks are not free."""
        with self.lock:
            self._collect()
            return len(self._holders)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        with self.lock:
            self._collect()
            return self._holders.get(block, 0)

    def take(self, count: int, after: int | None = None) -> tuple[int, ...]:
        """Free blocks: those behind the block `after` if they can be had, else the lowest.

        One run of consecutive blocks where there is one, since such a run is read in place.
        """
        with self.lock:
            self._collect()
            self._make_room(count)
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

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds these blocks."""
        with self.lock:
            for id in blocks:
                self._holders[id] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One sequence less holds these blocks."""
        with self.lock:
            for id in blocks:
                self._holders[id] -= 1
                if not self._holders[id]:
                    del self._holders[id]
                    self._taken[id] = 0

    def abandon(self, rows: Sequence[Row]) -> None:
        """Free what rows hold, from a finaliser.

        That may run in any thread, in the midst of another call here. So it only leaves a note,
        which the next call reads.
        """
        self._abandoned.append(rows)

    def _collect(self) -> None:
        while self._abandoned:
            for row in self._abandoned.popleft():
                self.free(row.blocks)

    def _make_room(self, count: int) -> None:
        """Grow to a power of two, so that the ranks, who copy all they hold, seldom do."""
        needed = len(self._holders) + count
        if needed <= self.blocks:
            return
        blocks = 1 << (needed - 1).bit_length()
        if self._enough is not None and needed <= self._enough:
            blocks = min(blocks, self._enough)
        self._taken.extend(bytes(blocks - self.blocks))


@dataclass(frozen=True)
class Growth:
    """Longer rows, and what that changed in the pool."""

    rows: tuple[Row, ...]
    taken: tuple[int, ...]
    """The blocks to free if the rows are not to grow after all."""
    replaced: tuple[int, ...]
    """The blocks to free once nobody goes back to the rows as they were."""
    copies: tuple[tuple[int, int], ...]
    """From and to: a block that others hold too is not written, but copied."""


def blocks_for(length: int, block: int) -> int:
    """How many blocks so many tokens fill."""
    return -(-length // block)


def grow(pool: BlockPool, rows: Sequence[Row], new: Sequence[int]) -> Growth:
    """Room for `new[i]` more tokens in `rows[i]`."""
    with pool.lock:
        return _grow(pool, rows, new)


def _grow(pool: BlockPool, rows: Sequence[Row], new: Sequence[int]) -> Growth:
    grown = list(rows)
    taken: list[int] = []
    replaced: Counter[int] = Counter()
    copies = []
    # Of the rows that share a last block the longest comes last and may write it in place, behind
    # the end of all the others: so their tokens are still there if the step fails.
    for index in sorted(range(len(rows)), key=lambda index: rows[index].length):
        row = rows[index]
        if not new[index]:
            continue
        length = row.length + new[index]
        kept, last = row.blocks, row.blocks[-1] if row.length % pool.block else None
        if last is not None and pool.holders(last) - replaced[last] > 1:
            kept = kept[:-1]
        missing = blocks_for(length, pool.block) - len(kept)
        fresh = pool.take(missing, after=kept[-1] if kept else None)
        if last is not None and len(kept) < len(row.blocks):
            replaced[last] += 1
            copies.append((last, fresh[0]))
        taken += fresh
        grown[index] = Row(kept + fresh, length)
    return Growth(tuple(grown), tuple(taken), tuple(replaced.elements()), tuple(copies))


def slots_of(before: Sequence[Row], after: Sequence[Row], block: int) -> torch.Tensor:
    """int64 [tokens]: the slots of the tokens that rows have gained, one row after the other."""
    runs = [torch.empty(0, dtype=torch.long)]
    for old, new in zip(before, after, strict=True):
        places = torch.arange(old.length, new.length)
        blocks = torch.tensor(new.blocks[old.length // block :], dtype=torch.long)
        runs.append(blocks[places // block - old.length // block] * block + places % block)
    return torch.cat(runs)


def tables_of(rows: Sequence[Row]) -> torch.Tensor:
    """int64 [rows, blocks]: the blocks of each row, then -1."""
    longest = max((len(row.blocks) for row in rows), default=0)
    padded = [[*row.blocks, *[-1] * (longest - len(row.blocks))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), longest)
