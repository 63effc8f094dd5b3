"""The values in buffers: frames, tiles and what they cover."""

from __future__ import annotations

from itertools import product
from random import Random

from tpcompile.vm.program import Box
from tpcompile.vm.proof.contents import Contents, Stored, covers, disjoint
from tpcompile.vm.proof.terms import Term, Terms

FRAME: Box = ((0, 4), (0, 6))


def _cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(*interval) for interval in box)))


def _box(dice: Random) -> Box:
    starts = [dice.randrange(3) for _ in range(2)]
    return tuple((start, start + 1 + dice.randrange(2)) for start in starts)


def test_covers_is_the_union_of_cells() -> None:
    dice, whole = Random(0), ((0, 3), (0, 3))
    results = set()
    for _ in range(600):
        tiles = tuple(_box(dice) for _ in range(dice.randrange(9)))
        expected = _cells(whole) <= {cell for tile in tiles for cell in _cells(tile)}
        assert covers(tiles, whole) is expected, tiles
        results.add(expected)
    assert results == {True, False}


def test_tiles_that_overlap_are_not_disjoint() -> None:
    assert disjoint([((0, 2), (0, 6)), ((2, 4), (0, 6))])
    assert not disjoint([((0, 2), (0, 6)), ((1, 4), (0, 6))])


def _stored(value: Term, *tiles: Box, frame: Box = FRAME) -> Stored:
    return Stored(value, frame, list(tiles))


def _missing(contents: Contents, frame: Box = FRAME) -> list[Box]:
    held = contents.at(0, frame)
    assert held is not None
    return held.missing


def test_a_value_is_there_once_its_tiles_cover_the_frame() -> None:
    contents, x = Contents(), Terms().call("x")
    assert contents.at(0, FRAME) is None and not contents.touched(0, FRAME)
    contents.store(0, FRAME, _stored(x, ((0, 4), (0, 2))))
    assert _missing(contents) == [((0, 4), (2, 6))]
    contents.store(0, FRAME, _stored(x, ((0, 4), (2, 6))))
    assert _missing(contents) == []


def test_another_value_makes_the_old_one_unreadable() -> None:
    contents, terms = Contents(), Terms()
    x, y = terms.call("x"), terms.call("y")
    contents.store(0, FRAME, _stored(x, FRAME))
    contents.store(0, FRAME, _stored(y, ((0, 4), (0, 2))))
    contents.store(0, FRAME, _stored(x, ((0, 4), (0, 2))))
    assert _missing(contents) == [((0, 4), (2, 6))], "x and y may both be wrong elsewhere"


def test_a_value_in_an_overlapping_frame_makes_the_old_one_unreadable() -> None:
    contents, terms = Contents(), Terms()
    half: Box = ((0, 2), (0, 6))
    other: Box = ((2, 4), (0, 6))
    for frame in (half, other):
        contents.store(0, frame, _stored(terms.call("x"), frame, frame=frame))
    assert not _missing(contents, half) and not _missing(contents, other)
    overlapping: Box = ((1, 2), (0, 6))
    contents.store(0, overlapping, _stored(terms.call("y"), overlapping, frame=overlapping))
    assert _missing(contents, half) and not _missing(contents, other)
    assert contents.touched(0, FRAME) and not contents.touched(1, FRAME)
