"""Tests of items that sequences hold, here blocks."""

from __future__ import annotations

from tests.serving.test_blocks import held


def test_blocks_are_taken_and_released() -> None:
    blocks, taken = held()
    assert sorted(taken) == [0, 1, 2, 3] and blocks.available == 0
    assert blocks.take(1) is None
    blocks.share(taken[:1])
    blocks.release(taken)
    assert blocks.available == 3 and blocks.holders(taken[0]) == 1
    blocks.release(taken[:1])
    assert blocks.available == 4 and blocks.kept == 0


def test_blocks_that_are_taken_together_are_consecutive_if_possible() -> None:
    blocks, taken = held()
    blocks.release([taken[0], taken[3]])
    blocks.release([taken[2]])
    assert blocks.take(2) == taken[2:]


def test_a_block_in_use_is_not_lost() -> None:
    blocks, taken = held()
    blocks.know(taken, [1, 2, 3, 4], 0, None)
    blocks.release(taken)
    blocks.share(taken[:2])
    assert blocks.take(2) is not None and blocks.take(1) is None
    assert len(blocks.find([1, 2, 3, 4], None)) == 2
