"""Pairs, medians and limits of the contention benchmark, with made numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.contend.conditions import (
    BY_NAME,
    CONDITIONS,
    LAUNCHES,
    LAUNCHES_TWO,
    OURS,
    TOKENS,
    Condition,
)
from benchmarks.contend.figures import Measured, Pair, Series, from_json, merged, to_json
from benchmarks.decode_measured import LLAMA, OPENVINO

NICE_0, QUOTA, TWIN = BY_NAME["nice-0"], BY_NAME["quota"], BY_NAME["two-at-once"]


def pair(ratio: float, before: float = 30.0, after: float = 30.0, late: float = 1.0) -> Pair:
    """Return a pair whose steps take `ratio` as long as alone, and two of ten `late` times that."""
    return Pair([[1.0] * 10], [[ratio] * 8 + [ratio * late] * 2], before, after)


def series(condition: Condition, side: str, *pairs: Pair) -> Series:
    return Series(condition.name, side, list(pairs))


def reached(slower: float = 0.99, late: float = 1.0, **changes: Any) -> Measured:
    """Return measurements near all limits: `slower` times them, and `late` beside processes."""
    all_series = [
        series(
            condition,
            side,
            pair(condition.most * factor * slower, late=late if condition.busy else 1.0),
        )
        for condition in CONDITIONS
        for side, factor in OURS.items()
    ]
    return Measured(**{"model": "qwen3-0.6b", "cores": 2, "series": all_series, **changes})


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [(30.0, 30.0, True), (30.0, 33.0, True), (33.0, 30.0, True), (30.0, 33.1, False),
     (33.1, 30.0, False)],
)  # fmt: skip
def test_a_pair_counts_if_the_read_loop_agrees(before: float, after: float, counts: bool) -> None:
    assert pair(1.0, before, after).counts is counts


def test_a_ratio_is_of_medians_and_with_a_quota_of_means() -> None:
    sample = Pair([[1.0, 1.0, 4.0]], [[1.0, 2.0, 9.0]], 1.0, 1.0)
    assert sample.ratio(NICE_0) == 2.0
    assert sample.ratio(QUOTA) == 2.0  # 12 / 6
    assert Pair([[1.0, 1.0, 4.0]], [[1.0, 2.0, 15.0]], 1.0, 1.0).ratio(QUOTA) == 3.0


def test_twins_are_compared_each_with_itself() -> None:
    twins = Pair([[1.0], [2.0]], [[2.0], [3.0]], 1.0, 1.0)
    assert twins.ratio(TWIN) == 2.0
    figures = series(TWIN, LAUNCHES, twins)
    assert (figures.milliseconds(alone=True), figures.milliseconds(alone=False)) == (2000.0, 3000.0)


def test_late_steps() -> None:
    assert pair(2.0, late=3.0).late == 3.0
    assert pair(2.0).late == 1.0
    steps = [1.0] * 9 + [100.0]  # one step of ten is beyond the 90th percentile
    assert Pair([steps], [steps], 1.0, 1.0).late < 11


def test_figures_are_medians_of_the_pairs_that_count() -> None:
    figures = series(NICE_0, LAUNCHES, pair(2.0), pair(9.0, 30.0, 40.0), pair(1.0), pair(1.5))
    assert (figures.ratio, len(figures.counted), figures.dropped) == (1.5, 3, 1)
    assert figures.milliseconds(alone=False) == 1500.0
    nothing = series(NICE_0, LAUNCHES, pair(2.0, 30.0, 40.0))
    assert nothing.ratio is nothing.late is nothing.milliseconds(alone=True) is None


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (reached(), True),
        (reached(1.02), False),
        (reached(late=1.9), True),
        (reached(late=2.3), False),
        (reached(1.02, model="tiny-qwen3"), True),
        (reached(1.02, cores=1), True),
        (reached(missing={TOKENS: "it fell"}), False),
        (reached(not_installed={LLAMA: "no package"}), True),
        (reached(impossible={"quota": "no cgroup"}), True),
        (reached(gaps={TOKENS: [0.1, 0.2]}), True),
        (reached(gaps={TOKENS: [0.3, 0.2]}), False),
        (reached(series=[series(NICE_0, LAUNCHES, pair(1.0, 30.0, 40.0))]), False),
        (reached(series=[series(NICE_0, OPENVINO, pair(99.0))]), True),
    ],
)
def test_what_fails(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_two_ranks_may_take_a_tenth_longer() -> None:
    most = {(t.side, t.what): t.most for t in reached().targets() if t.condition == "nice-0"}
    assert most[LAUNCHES, "ratio"] == 1.6 and most[LAUNCHES_TWO, "ratio"] == 1.76
    assert most[LAUNCHES, "late"] == 2.0 and most[LAUNCHES_TWO, "late"] == 2.2


def test_late_steps_have_a_limit_only_beside_busy_processes() -> None:
    assert {t.condition for t in reached().targets() if t.what == "late"} == {
        condition.name for condition in CONDITIONS if condition.busy
    }


def test_json_round_trip() -> None:
    measured = reached(gaps={TOKENS: [0.1, 0.2]}, impossible={"quota": "no cgroup"})
    report = json.loads(json.dumps(to_json(measured)))
    assert from_json(report) == measured
    assert report["ok"] and all(target["ok"] for target in report["targets"])
    assert report["figures"][0]["ratio"] == pytest.approx(0.99 * 1.15)


def test_runs_are_merged() -> None:
    first = reached(series=[series(NICE_0, LAUNCHES, pair(1.0))], gaps={LAUNCHES: [0.1, 0.2]})
    second = reached(
        series=[series(NICE_0, LAUNCHES, pair(2.0)), series(QUOTA, TOKENS, pair(1.0))],
        gaps={LAUNCHES: [0.3, 0.2], TOKENS: [0.1, 0.2]},
        not_installed={LLAMA: "no package"},
    )
    union = merged([first, second])
    assert [(s.condition, s.side, len(s.pairs)) for s in union.series] == [
        ("nice-0", LAUNCHES, 2),
        ("quota", TOKENS, 1),
    ]
    assert union.gaps == {LAUNCHES: [0.3, 0.2], TOKENS: [0.1, 0.2]}
    assert union.not_installed == {LLAMA: "no package"}
    with pytest.raises(ValueError, match="one model and machine"):
        merged([first, reached(model="tiny-qwen3")])
