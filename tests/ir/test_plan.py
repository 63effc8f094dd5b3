"""Tests of the sharding plan for all numbers of heads and ranks."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpcompile.errors import ShardingError
from tpcompile.ir.plan import (
    COARSEST_GRAIN,
    EXPERT_AXIS,
    RUNS_PER_RANK,
    choose_experts,
    expert_plans,
    plan_axis,
    plan_heads,
)

EXAMPLES = settings(deadline=None, derandomize=True)


@st.composite
def _heads(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw query heads, KV heads that divide them, and ranks."""
    queries = draw(st.integers(1, 64))
    keys = draw(st.sampled_from([n for n in range(1, queries + 1) if queries % n == 0]))
    return queries, keys, draw(st.integers(1, queries))


@EXAMPLES
@given(_heads())
def test_query_heads_are_contiguous_runs_that_differ_by_at_most_one(
    heads: tuple[int, int, int],
) -> None:
    queries, keys, tp = heads
    layout = plan_heads(queries, keys, tp).queries
    assert [head for rank in range(tp) for head in layout.units_of(rank)] == list(range(queries))
    assert all(len(part) == 1 for part in layout.parts)
    counts = [layout.unit_count(rank) for rank in range(tp)]
    assert max(counts) - min(counts) <= 1
    assert layout.refusal() is None
    assert layout.overlap() is None


@EXAMPLES
@given(_heads())
def test_kv_heads_are_exactly_those_that_are_read(heads: tuple[int, int, int]) -> None:
    queries, keys, tp = heads
    plan = plan_heads(queries, keys, tp)
    group = queries // keys
    for rank in range(tp):
        read = sorted({head // group for head in plan.queries.units_of(rank)})
        assert plan.keys.units_of(rank) == read
    assert plan.keys.refusal() is None


@EXAMPLES
@given(_heads(), st.integers(1, 100))
def test_more_ranks_than_query_heads_are_refused(heads: tuple[int, int, int], more: int) -> None:
    queries, keys, _ = heads
    with pytest.raises(ShardingError, match=f"{queries} query heads") as refused:
        plan_heads(queries, keys, queries + more)
    assert f"a tp from 1 to {queries}" in str(refused.value)


@EXAMPLES
@given(st.integers(1, 40000), st.integers(1, 16))
def test_an_axis_is_partitioned_exactly(size: int, tp: int) -> None:
    if tp > size:
        with pytest.raises(ShardingError, match="cannot be split"):
            plan_axis("ffn", size, tp)
        return
    layout = plan_axis("ffn", size, tp)
    intervals = [interval for rank in range(tp) for interval in layout.intervals(rank)]
    assert [i for start, stop in intervals for i in (start, stop)][1:-1:2] == [
        start for start, _ in intervals[1:]
    ]
    assert (intervals[0][0], intervals[-1][1]) == (0, size)
    extents = [layout.extent(rank) for rank in range(tp)]
    assert sum(extents) == size
    assert max(extents) - min(extents) in (0, layout.grain)


@EXAMPLES
@given(st.integers(1, 40000), st.integers(1, 16))
def test_the_grain_is_the_coarsest_that_leaves_runs_even(size: int, tp: int) -> None:
    if tp > size:
        return
    grain = plan_axis("ffn", size, tp).grain
    fitting = [
        g for g in (128, 64, 32, 16, 8, 4, 2) if size % g == 0 and size // g >= RUNS_PER_RANK * tp
    ]
    assert grain == (fitting[0] if fitting else 1)
    assert grain <= COARSEST_GRAIN


@EXAMPLES
@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 64))
def test_an_asked_grain_is_kept_or_refused(units: int, tp: int, grain: int) -> None:
    if units < tp:
        with pytest.raises(ShardingError, match=f"a grain of {grain}"):
            plan_axis("ffn", units * grain, tp, grain)
        return
    layout = plan_axis("ffn", units * grain, tp, grain)
    assert (layout.grain, layout.units) == (grain, units)


@EXAMPLES
@given(st.integers(1, 4000), st.integers(1, 16))
def test_a_least_grain_holds_for_all_edges_but_the_last(size: int, tp: int) -> None:
    if -(-size // 16) < tp:
        with pytest.raises(ShardingError, match="a grain of 16"):
            plan_axis("ffn", size, tp, least=16)
        return
    layout = plan_axis("ffn", size, tp, least=16)
    edges = [edge for rank in range(tp) for run in layout.intervals(rank) for edge in run]
    assert (edges[0], edges[-1], layout.refusal()) == (0, size, None)
    assert edges[1:-1:2] == edges[2::2] and not any(edge % 16 for edge in edges[:-1])
    extents = [layout.extent(rank) for rank in range(tp)]
    assert sum(extents) == size


@pytest.mark.parametrize("grain", [3, 100, 352, -16])
def test_a_grain_that_does_not_divide_is_refused(grain: int) -> None:
    with pytest.raises(ShardingError, match="The axis ffn of 176 cannot be split") as refused:
        plan_axis("ffn", 176, 4, grain)
    assert f"a grain of {grain}" in str(refused.value)


@pytest.mark.parametrize(
    ("queries", "keys", "tp", "runs", "read"),
    [
        (14, 2, 4, [4, 4, 3, 3], [[0], [0, 1], [1], [1]]),
        (6, 2, 4, [2, 2, 1, 1], [[0], [0, 1], [1], [1]]),
        (12, 4, 6, [2] * 6, [[0], [0, 1], [1], [2], [2, 3], [3]]),
        (8, 8, 3, [3, 3, 2], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (8, 1, 8, [1] * 8, [[0]] * 8),
    ],
)
def test_known_plans(
    queries: int, keys: int, tp: int, runs: list[int], read: list[list[int]]
) -> None:
    plan = plan_heads(queries, keys, tp)
    assert [plan.queries.unit_count(rank) for rank in range(tp)] == runs
    assert [plan.keys.units_of(rank) for rank in range(tp)] == read


def _expected_most(held: list[int], chosen: int) -> float:
    """Return the mean over all choices of the largest number of them that a rank holds."""
    owners = [rank for rank, count in enumerate(held) for _ in range(count)]
    choices = list(combinations(owners, chosen))
    return sum(max(Counter(choice).values()) for choice in choices) / len(choices)


@EXAMPLES
@given(st.integers(1, 12), st.data())
def test_the_expected_load_is_the_mean_over_all_choices(count: int, data: st.DataObject) -> None:
    chosen, tp = data.draw(st.integers(1, count)), data.draw(st.integers(1, min(count, 5)))
    layout, cost = expert_plans(count, 1, chosen, tp)["ep"]
    held = [layout.extent(rank) for rank in range(tp)]
    assert (sum(held), max(held) - min(held) <= 1) == (count, True)
    assert cost == pytest.approx(_expected_most(held, chosen))


def test_plans_of_experts_that_exist() -> None:
    assert expert_plans(8, 48, 3, 4).keys() == {"tp", "ep"}
    assert expert_plans(3, 48, 3, 4).keys() == {"tp"}
    assert expert_plans(8, 48, 3, 4, 16).keys() == {"ep"}
    assert expert_plans(3, 48, 3, 4, 16).keys() == set()


def test_the_plan_of_experts_is_the_cheaper_one() -> None:
    """Splits are even for most sizes; whole experts are cheaper if a split would be uneven."""
    plans = expert_plans(128, 768, 8, 8)
    assert plans["tp"][1] == 1 < plans["ep"][1]
    assert choose_experts(plans, "auto") is plans["tp"][0]
    assert choose_experts(plans, "ep").axis == EXPERT_AXIS
    uneven = expert_plans(16, 3, 1, 2)
    assert uneven["tp"][1] == pytest.approx(2 / 3) and uneven["ep"][1] == 1
    coarse = expert_plans(16, 160, 16, 2, 128)
    assert choose_experts(coarse, "auto") is coarse["ep"][0]
    single = expert_plans(16, 32, 4, 1)
    assert single["tp"][1] == single["ep"][1] == 4
