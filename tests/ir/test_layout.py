"""Tests of layouts: the ranks' parts, invalid layouts, and even runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, intervals_of, layouts
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs

HEADS = Layout("heads", 6, 4, (((0, 2),), ((2, 3), (5, 6)), ((3, 5),)))


def test_units_and_elements_of_a_rank() -> None:
    assert (HEADS.ranks, HEADS.size) == (3, 24)
    assert HEADS.units_of(1) == [2, 5]
    assert HEADS.intervals(1) == ((8, 12), (20, 24))
    assert (HEADS.unit_count(1), HEADS.extent(1)) == (2, 8)
    assert str(HEADS) == "heads"
    assert HEADS.with_grain(1).intervals(1) == HEADS.parts[1]
    assert HEADS.with_grain(4) == HEADS and hash(HEADS.with_grain(4)) == hash(HEADS)


@EXAMPLES
@given(st.data(), RANKS, st.booleans())
def test_random_layouts_are_layouts(data: st.DataObject, ranks: int, overlapping: bool) -> None:
    layout = data.draw(layouts(ranks, overlapping=overlapping))
    assert layout.refusal() is None
    held = [set(layout.units_of(rank)) for rank in range(ranks)]
    assert set().union(*held) == set(range(layout.units))
    shared = sum(map(len, held)) - layout.units
    assert (layout.overlap() is None) == (shared == 0)
    for rank in range(ranks):
        assert intervals_of(layout.units_of(rank)) == layout.parts[rank]
        elements = [e for start, stop in layout.intervals(rank) for e in range(start, stop)]
        assert len(elements) == layout.extent(rank)
        assert {e // layout.grain for e in elements} == held[rank]


@EXAMPLES
@given(st.data(), RANKS)
def test_fused_layouts_are_their_segments_one_after_the_other(
    data: st.DataObject, ranks: int
) -> None:
    layout = data.draw(fused_layouts(ranks, overlapping=True))
    assert layout.refusal() is None
    assert layout.ranks == ranks
    assert layout.axis == str(layout) == "+".join(s.axis for s in layout.segments)
    for rank in range(ranks):
        expected, offset = [], 0
        for segment in layout.segments:
            expected += [(offset + a, offset + b) for a, b in segment.intervals(rank)]
            offset += segment.size
        assert list(layout.intervals(rank)) == expected
        assert layout.extent(rank) == sum(b - a for a, b in expected)
    assert layout.size == offset
    assert (layout.overlap() is None) == all(s.overlap() is None for s in layout.segments)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((((0, 3),), ((4, 6),)), "no rank holds axis unit 3 (1 missing)"),
        ((((0, 6),), ()), "rank 1 holds no units of axis"),
        ((((0, 6),), ((2, 2),)), "rank 1 holds no units of axis"),
        ((((0, 6),), ((5, 7),)), "outside the 6 units"),
        ((((-1, 6),), ((5, 6),)), "outside the 6 units"),
        ((((0, 3), (2, 6)), ((5, 6),)), "twice or out of order"),
        ((((3, 6), (0, 3)), ((5, 6),)), "twice or out of order"),
        ((((0, 6), (4, 3)), ((5, 6),)), "outside the 6 units"),
    ],
)
def test_what_is_no_layout(parts: tuple[tuple[tuple[int, int], ...], ...], reason: str) -> None:
    layout = Layout("axis", 6, 1, parts)
    refusal = layout.refusal()
    assert refusal is not None and reason in refusal
    good = Layout("axis", 6, 1, even_runs(6, 2))
    assert FusedLayout((good, layout)).refusal() == refusal


def test_overlaps_are_counted() -> None:
    shared = Layout("axis", 6, 1, (((0, 4),), ((2, 6),)))
    assert shared.refusal() is None
    assert shared.overlap() == "2 units of axis are on more than one rank"
    everywhere = Layout("heads", 1, 1, (((0, 1),),) * 4)
    assert everywhere.overlap() == "1 units of heads are on more than one rank"


def test_segments_lie_on_the_same_ranks() -> None:
    fused = FusedLayout((Layout("a", 6, 1, even_runs(6, 2)), Layout("b", 6, 1, even_runs(6, 3))))
    assert fused.refusal() == "the segments of a+b are on different numbers of ranks"


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_runs_differ_by_at_most_one(units: int, ranks: int) -> None:
    runs = even_runs(units, ranks)
    sizes = [stop - start for ((start, stop),) in runs]
    assert len(runs) == ranks and sum(sizes) == units
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "longer runs come first"
    assert [unit for ((start, stop),) in runs for unit in range(start, stop)] == [*range(units)]


@given(st.integers(1, 12), st.integers(0, 60))
def test_tokens_come_in_even_runs(ranks: int, tokens: int) -> None:
    layout = TokenLayout(ranks)
    bounds = [layout.run(rank, tokens) for rank in range(ranks)]
    assert bounds[0][0] == 0 and bounds[-1][1] == tokens
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert layout.refusal() is None and layout.overlap() is None
    assert str(layout) == "tokens"
