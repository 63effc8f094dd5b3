"""Tests of block allocation: free runs, owners, and growth of rows."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpcompile.runtime.kv.blocks import BlockPool, Row, grow, slots_of, tables_of


def test_the_lowest_free_blocks_come_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == (0, 1, 2)
    pool.free((1,))
    assert pool.take(1) == (1,)
    assert pool.take(1) == (3,)


def test_a_sequence_goes_on_behind_its_last_block() -> None:
    pool = BlockPool(4)
    pool.take(8)
    pool.free((0, 1, 5, 6))
    assert pool.take(2, after=4) == (5, 6)
    assert pool.take(1, after=7) == (0,)


def test_several_blocks_are_one_run_where_there_is_one() -> None:
    pool = BlockPool(4)
    pool.take(8)
    pool.free((1, 4, 5, 7))
    assert pool.take(2) == (4, 5)
    assert pool.take(2) == (1, 7), "without a free run, scattered blocks are used before growing"
    assert pool.blocks == 8


@pytest.mark.parametrize(("taken", "blocks"), [(0, 0), (1, 1), (3, 4), (16, 16), (17, 32)])
def test_room_is_made_for_a_doubling(taken: int, blocks: int) -> None:
    pool = BlockPool(4)
    pool.take(taken)
    assert pool.blocks == blocks


def test_a_doubling_stops_at_what_is_enough_but_more_can_be_had() -> None:
    pool = BlockPool(4, enough=20)
    pool.take(17)
    assert pool.blocks == 20
    pool.take(4)
    assert pool.blocks == 32


def test_a_pool_can_grow_exactly() -> None:
    pool = BlockPool(1)
    assert pool.take(5, exactly=True) == (0, 1, 2, 3, 4) and pool.blocks == 5
    assert pool.take(1, exactly=True) == (5,) and pool.blocks == 6
    pool.take(1)
    assert pool.blocks == 8


def test_a_shared_block_is_free_when_the_last_lets_go() -> None:
    pool = BlockPool(4)
    held = pool.take(2)
    pool.share(held)
    pool.free(held)
    assert (pool.used, pool.holders(0)) == (2, 1)
    pool.free(held)
    assert (pool.used, pool.holders(0)) == (0, 0)


def test_what_a_finaliser_leaves_is_free_at_the_next_call() -> None:
    pool = BlockPool(4)
    pool.abandon([Row(pool.take(1), 3), Row(pool.take(1), 4)])
    assert pool.take(2) == (0, 1)
    pool.abandon([Row((0, 1), 8)])
    assert pool.used == 0


@given(st.lists(st.integers(-3, 5), max_size=30))
def test_no_block_is_handed_out_twice(moves: list[int]) -> None:
    pool, held = BlockPool(4), []
    most = 0
    for count in moves:
        if count > 0:
            held.append(pool.take(count, after=held[-1][-1] if held else None))
            assert len(held[-1]) == count
        elif held:
            pool.free(held.pop(count % len(held)))
        flat = [id for blocks in held for id in blocks]
        most = max(most, len(flat))
        assert len(set(flat)) == len(flat) == pool.used
        assert all(id < pool.blocks for id in flat)
        assert pool.blocks <= max(1, 2 * most - 1)


def test_a_row_fills_its_last_block_before_it_takes_another() -> None:
    pool = BlockPool(4)
    growth = grow(pool, [Row(pool.take(1), 3)], [2])
    assert growth.rows == (Row((0, 1), 5),)
    assert (growth.taken, growth.replaced, growth.copies) == ((1,), (), ())


def test_a_full_block_stays_shared() -> None:
    pool = BlockPool(4)
    row = Row(pool.take(1), 4)
    pool.share(row.blocks)
    growth = grow(pool, [row, row], [1, 1])
    assert growth.rows == (Row((0, 1), 5), Row((0, 2), 5))
    assert not growth.copies


def test_of_rows_that_share_a_last_block_all_but_one_copy_it() -> None:
    pool = BlockPool(4)
    row = Row(pool.take(1), 2)
    pool.share(row.blocks * 2)
    growth = grow(pool, [row] * 3, [1, 1, 1])
    assert growth.copies == ((0, 1), (0, 2))
    assert growth.replaced == (0, 0)
    assert [row.blocks for row in growth.rows] == [(1,), (2,), (0,)]


def test_the_longest_row_writes_in_place_and_so_behind_the_end_of_all_others() -> None:
    pool = BlockPool(4)
    first = pool.take(1)
    pool.share(first)
    growth = grow(pool, [Row(first, 3), Row(first, 1)], [1, 1])
    assert growth.rows == (Row((0,), 4), Row((1,), 2))


def test_a_row_that_does_not_grow_still_holds_its_block() -> None:
    pool = BlockPool(4)
    row = Row(pool.take(1), 2)
    pool.share(row.blocks)
    growth = grow(pool, [row, row], [0, 1])
    assert growth.rows == (row, Row((1,), 3))


def test_slots_and_tables() -> None:
    before = [Row((2,), 3), Row()]
    after = [Row((2, 5), 6), Row((0,), 2)]
    assert slots_of(before, after, 4).tolist() == [11, 20, 21, 0, 1]
    assert tables_of(after).tolist() == [[2, 5], [0, -1]]
    assert tables_of([]).shape == (0, 0)


def test_growth_that_is_undone_leaves_the_size_of_the_pool() -> None:
    """The ranks may have failed to allocate the blocks, and would fail again in the next step."""
    pool = BlockPool(4, states=BlockPool(1))
    (row,) = grow(pool, [Row()], [5]).rows
    sizes = pool.sizes
    growth = grow(pool, [row, Row(), Row()], [400, 400, 4])
    assert pool.sizes > sizes
    growth.undo(pool, [row, Row(), Row()])
    assert pool.sizes == sizes and pool.used == 2
    other = pool.take(9)
    pool.shrink_to(sizes)
    assert pool.blocks == max(other) + 1, "blocks that are held stay"


def test_threads_that_take_at_once_never_get_one_block() -> None:
    pool, held, twice = BlockPool(32, 64), set[int](), list[int]()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work() -> None:
        for _ in range(3000):
            taken = pool.take(2)
            twice.extend(held.intersection(taken))
            held.update(taken)
            held.difference_update(taken)
            pool.free(taken)

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not twice
    assert pool.used == 0
