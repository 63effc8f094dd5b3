"""After any operations on the caches of a pool, each row reads back its own tokens."""

from __future__ import annotations

import copy

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.runtime.slots import BLOCK, Slots, read
from tpcompile.errors import UsageError
from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import PagedCache

LONGEST = 18
WIDEST = 4


def tokens_of(columns: list[list[int | None]]) -> list[list[int]]:
    return [[token for token in row if token is not None] for row in columns]


class Histories(RuleBasedStateMachine):
    """State machine of caches in one pool, with the expected tokens of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCK)
        self.slots = Slots()
        self.caches: list[tuple[PagedCache, list[list[int | None]]]] = []
        self.said = 0
        self.most = 0

    @initialize()
    def begin(self) -> None:
        self.caches = [(PagedCache(self.pool, 2, LONGEST, WIDEST), [])]

    @rule(which=st.integers(0, 9), marks=st.data(), fails=st.booleans())
    def append(self, which: int, marks: st.DataObject, fails: bool) -> None:
        cache, columns = self._pick(which)
        batch = len(columns) if columns and columns[0] else marks.draw(st.integers(1, WIDEST))
        line = st.lists(
            st.booleans(), min_size=(new := marks.draw(st.integers(1, 6))), max_size=new
        )
        real = marks.draw(st.lists(line, min_size=batch, max_size=batch))
        tokens = list(range(self.said, self.said + sum(map(sum, real))))
        self.said += len(tokens)
        before = copy.copy(columns) if columns and columns[0] else [[] for _ in real]
        try:
            with cache.append(torch.tensor(real)) as appended:
                self.slots.run(appended, tokens)
                if fails:
                    raise InterruptedError
        except InterruptedError:
            return
        except UsageError:
            lengths = [len(row) for row in tokens_of(before)]
            wanted = max(n + sum(more) for n, more in zip(lengths, real, strict=True))
            assert wanted > LONGEST
            return
        fresh = iter(tokens)
        columns[:] = [
            [*row, *(next(fresh) if mark else None for mark in line)]
            for row, line in zip(before, real, strict=True)
        ]

    @rule(which=st.integers(0, 9), removed=st.integers(0, 9))
    def crop(self, which: int, removed: int) -> None:
        cache, columns = self._pick(which)
        cache.crop(-removed)
        columns[:] = [row[: max(0, len(row) - removed)] for row in columns]

    @rule(which=st.integers(0, 9), beams=st.lists(st.integers(0, 99), min_size=1, max_size=WIDEST))
    def reorder(self, which: int, beams: list[int]) -> None:
        cache, columns = self._pick(which)
        chosen = [beam % max(1, len(columns)) for beam in beams]
        cache.reorder_cache(torch.tensor(chosen))
        if columns and columns[0]:
            columns[:] = [list(columns[index]) for index in chosen]

    @rule(which=st.integers(0, 9))
    def repeat(self, which: int) -> None:
        cache, columns = self._pick(which)
        if 2 * len(columns) <= WIDEST:
            cache.batch_repeat_interleave(2)
            if columns and columns[0]:
                columns[:] = [list(row) for row in columns for _ in range(2)]

    @rule(which=st.integers(0, 9))
    def duplicate(self, which: int) -> None:
        cache, columns = self._pick(which)
        if len(self.caches) < 4:
            self.caches.append((copy.deepcopy(cache), [list(row) for row in columns]))

    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        if len(self.caches) > 1:
            del self.caches[which % len(self.caches)]

    @rule(which=st.integers(0, 9))
    def reset(self, which: int) -> None:
        cache, columns = self._pick(which)
        cache.reset()
        columns.clear()

    def _pick(self, which: int) -> tuple[PagedCache, list[list[int | None]]]:
        return self.caches[which % len(self.caches)]

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for cache, columns in self.caches:
            filled = columns if columns and columns[0] else []
            assert cache.get_seq_length() == (len(filled[0]) if filled else 0)
            if filled:
                assert read(cache, self.slots) == tokens_of(filled)

    @invariant()
    def only_what_is_held_is_taken(self) -> None:
        rows = [row for cache, _ in self.caches for row in cache._rows]
        held = [id for row in rows for id in row.blocks]
        assert {id: self.pool.holders(id) for id in held} == {id: held.count(id) for id in held}
        assert self.pool.used == len(set(held))

    def teardown(self) -> None:
        self.caches.clear()
        assert self.pool.used == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
