"""Several caches in one step: the inputs of each, and all restored if the step raises."""

from __future__ import annotations

import pytest

from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import PagedCache
from tpcompile.runtime.kv.joined import append_all

BLOCK = 4


def caches_of(pool: BlockPool, *lengths: int) -> list[PagedCache]:
    caches = [PagedCache(pool, layers=1, max_seq_len=32) for _ in lengths]
    with append_all(caches, lengths):
        pass
    return caches


def test_each_sequence_has_slots_blocks_and_a_length() -> None:
    caches = caches_of(BlockPool(BLOCK), 3, 9)
    with append_all(caches, [2, 1]) as placed:
        first, second = ([block for block in row if block >= 0] for row in placed.tables.tolist())
        assert (len(first), len(second)) == (2, 3)
        assert not set(first) & set(second)
        assert placed.slots.tolist() == [
            first[0] * BLOCK + 3,
            first[1] * BLOCK,
            second[2] * BLOCK + 1,
        ]
        assert placed.lengths.tolist() == [5, 10]
        assert placed.blocks > max(*first, *second)
    assert [cache.lengths for cache in caches] == [(5,), (10,)]


def test_states_are_read_and_written_by_each() -> None:
    caches = caches_of(BlockPool(BLOCK, states=BlockPool(1)), 3, 5)
    with append_all(caches, [1, 1]) as placed:
        states = [*placed.read.tolist(), *placed.write.tolist()]
        assert len(set(states)) == 4
        assert placed.states > max(states)


def test_a_copy_gets_a_block_of_its_own() -> None:
    pool = BlockPool(BLOCK)
    (cache,) = caches_of(pool, 3)
    copied = cache.__deepcopy__({})
    with append_all([copied], [1]) as placed:
        ((source, target),) = placed.copies
        assert placed.tables.tolist() == [[target]] and source != target


def test_all_are_restored_if_the_step_raises() -> None:
    pool = BlockPool(BLOCK)
    caches = caches_of(pool, 3, 9)
    used = pool.used
    with pytest.raises(RuntimeError, match="no memory"), append_all(caches, [2, 20]):
        raise RuntimeError("no memory")
    assert pool.used == used
    assert [cache.lengths for cache in caches] == [(3,), (9,)]
    assert [cache.real.shape[1] for cache in caches] == [3, 9]
