"""Regions overlap if and only if they share a cell, in any number of dimensions."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import MANY, Touch, boxes
from tpcompile.vm.program import Region, overlap
from tpcompile.vm.proof.cells import Parts, cut

SHAPES = [(), (1,), (9,), (3, 4), (2, 3, 4)]


@MANY
@given(st.sampled_from(SHAPES).flatmap(lambda s: st.lists(boxes(s), min_size=1, unique=True)))
def test_cells_are_shared_by_what_overlaps(parts: Any) -> None:
    cut_parts = cut(parts)
    for number, (cells, near) in enumerate(cut_parts):
        assert cells
        overlapping = [n for n, other in enumerate(parts) if overlap(parts[number], other)]
        assert sorted(near) == overlapping
        for other in near:
            assert cells & cut_parts[other][0]


@MANY
@given(st.sampled_from(SHAPES).flatmap(lambda s: st.lists(boxes(s), min_size=1, unique=True)))
def test_a_part_is_written_over_when_all_its_elements_are(parts: Any) -> None:
    cut_parts = cut(parts)
    left, bare = cut_parts[0][0], _elements(parts[0])
    for number in cut_parts[0][1]:
        if number:
            left &= ~cut_parts[number][0]
            bare -= _elements(parts[number])
        assert bool(left) == bool(bare)


def _elements(box: Any) -> set[tuple[int, ...]]:
    elements: set[tuple[int, ...]] = {()}
    for start, stop in box:
        elements = {(*place, index) for place in elements for index in range(start, stop)}
    return elements


def test_only_what_is_written_is_numbered() -> None:
    weight, x, low = Region(0, ((0, 4),)), Region(1, ((0, 4),)), Region(1, ((0, 2),))
    parts = Parts([Touch((weight, x), (low,)), Touch((low, x))])
    assert parts.reads == [[0], [1, 0]] and parts.writes == [[1], []]
    assert [sorted(near) for near in parts.near] == [[0, 1], [0, 1]]


def test_parts_are_numbered_by_first_access() -> None:
    x, low, high = (Region(0, ((start, stop),)) for start, stop in ((0, 4), (0, 2), (2, 4)))
    parts = Parts([Touch(writes=(low,)), Touch((x, low), (x, high)), Touch((high,))])
    assert parts.regions == [low, x, high] and parts.read_first == [1]
    assert parts.written == {0}


def test_known_parts_are_taken_only_for_the_same_instructions() -> None:
    steps = (Touch(writes=(Region(0, ((0, 4),)),)), Touch())
    parts = Parts(steps)
    assert Parts.of(steps, parts) is parts
    for other, known in ((steps, None), (steps[:1], parts)):
        assert Parts.of(other, known).instructions is other


def test_boxes_of_all_accesses_are_collected() -> None:
    weight, x, low = Region(0, ((0, 4),)), Region(1, ((0, 4),)), Region(1, ((0, 2),))
    parts = Parts([Touch((weight, x), (low,)), Touch((weight, low))])
    assert parts.boxes == {0: [weight.box, weight.box], 1: [x.box, low.box]}


def test_instructions_are_left_out() -> None:
    x, low = Region(0, ((0, 4),)), Region(0, ((0, 2),))
    steps = (Touch((x,)), Touch((), (low,)), Touch((low,)), Touch((x, low)))
    parts = Parts(steps)
    shorter = parts.without(slice(1, 3))
    assert shorter.instructions == (steps[0], steps[3])
    assert (shorter.reads, shorter.writes) == ([[0], [0, 1]], [[], []])
    assert shorter.near == parts.near and len(parts.reads) == 4


def test_buffers_with_the_same_parts_are_cut_alike() -> None:
    whole = [Region(buffer, ((0, 4),)) for buffer in range(2)]
    low = [Region(buffer, ((0, 2),)) for buffer in range(2)]
    parts = Parts([Touch((whole[n],), (low[n],)) for n in range(2)])
    assert parts.cells[:2] == parts.cells[2:]
    assert [sorted(near) for near in parts.near] == [[0, 1], [0, 1], [2, 3], [2, 3]]
