"""Tests of blocks: holders, contents that can be shared, and the order in which they are lost."""

from __future__ import annotations

import pytest

from tpcompile.serving import blocks as room
from tpcompile.serving.blocks import Blocks


def held(count: int = 4, size: int = 2) -> tuple[Blocks, list[int]]:
    """Return all blocks of a pool, held by one sequence."""
    blocks = Blocks(count, size)
    taken = blocks.take(count)
    assert taken is not None
    return blocks, taken


def test_known_contents_are_found_until_the_block_is_needed() -> None:
    blocks, taken = held()
    blocks.know(taken, [1, 2, 3, 4, 5, 6], 0, None)
    blocks.release(taken)
    assert (blocks.kept, blocks.available) == (3, 4)
    assert [c.block for c in blocks.find([1, 2, 3, 4, 9, 9], None)] == taken[:2]
    assert [c.block for c in blocks.find([1, 2, 3, 4, 5], None)] == taken[:2]
    assert blocks.find([2, 1, 3, 4], None) == []
    assert blocks.take(2) is not None  # the free one, and the end of the known ones
    assert [c.block for c in blocks.find([1, 2, 3, 4, 5, 6], None)] == taken[:2]


def test_the_same_tokens_after_others_are_other_contents() -> None:
    blocks, taken = held()
    blocks.know(taken, [1, 2, 3, 4], 0, None)
    assert blocks.find([3, 4], None) == []


def test_a_salt_separates_tenants() -> None:
    blocks, taken = held()
    blocks.know(taken, [1, 2], 0, "a")
    assert blocks.find([1, 2], "b") == [] == blocks.find([1, 2], None)
    assert len(blocks.find([1, 2], "a")) == 1


def test_a_hash_is_only_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all contents had the same hash, wrong ones would still not be found."""
    monkeypatch.setattr(room, "_key", lambda parent, tokens, salt: 0)
    blocks, taken = held()
    blocks.know(taken, [1, 2, 3, 4], 0, None)
    assert blocks.find([5, 6], None) == []
    assert len(blocks.find([1, 2], None)) == 1


def test_contents_that_are_known_already_are_not_recorded_twice() -> None:
    blocks, taken = held()
    blocks.know(taken[:2], [1, 2, 3, 4], 0, None)
    blocks.know(taken[2:], [1, 2, 3, 5], 0, None)
    assert [c.block for c in blocks.find([1, 2, 3, 4], None)] == taken[:2]
    blocks.know(taken[2:], [1, 2, 3, 5], 1, None)  # its first block is not the known one
    assert [c.block for c in blocks.find([1, 2, 3, 5], None)] == taken[:1]
    blocks.release(taken)
    assert blocks.kept == 2


def test_a_sequence_gets_the_known_blocks_in_place_of_its_own() -> None:
    """With `merge`, what follows them is recorded, also after some of them were lost."""
    blocks, taken = held(6)
    first, second = taken[:3], taken[3:]
    blocks.know(first, [1, 2, 3, 4, 5, 6], 0, None)
    blocks.know(second, [1, 2, 3, 4, 7, 8], 0, None, merge=True)
    assert second == [*first[:2], taken[5]] and blocks.available == 2
    assert [c.block for c in blocks.find([1, 2, 3, 4, 7, 8], None)] == second
    blocks.release(first)
    blocks.release(second)
    assert (blocks.kept, blocks.available) == (4, 6)


def test_a_sequence_keeps_its_blocks_if_another_salt_has_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the hashes are equal."""
    monkeypatch.setattr(room, "_key", lambda parent, tokens, salt: 0)
    blocks, taken = held()
    second = taken[2:]
    blocks.know(taken[:2], [1, 2], 0, "a")
    blocks.know(second, [1, 2], 0, "b", merge=True)
    assert second == taken[2:] and blocks.find([1, 2], "b") == []


def test_contents_that_are_lost_are_told() -> None:
    lost = []
    blocks = Blocks(2, 2, lost=lost.append)
    taken = blocks.take(2)
    assert taken is not None
    blocks.know(taken, [1, 2, 3, 4], 0, None)
    known = blocks.find([1, 2, 3, 4], None)
    assert [blocks.content(block) for block in taken] == known
    blocks.release(taken)
    assert blocks.take(1) == taken[1:] and lost == known[1:]
    assert blocks.content(taken[1]) is None


def test_a_lost_block_hides_those_after_it() -> None:
    """Contents after a lost block cannot be found, also if its tokens are computed again."""
    blocks, taken = held(3)
    blocks.know(taken, [1, 2, 3, 4], 0, None)
    blocks.share(taken[1:2])
    blocks.release(taken)
    assert blocks.take(2) is not None  # the free block, and then the first one, which is known
    assert blocks.find([1, 2, 3, 4], None) == []
