"""The schedule benchmark reports missed targets, and its phases sum to the total."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import schedule
from benchmarks.schedule import CASES, FEW, MANY, Case, Measured, Run, main, run_cold

_RUN = Run(2.0, 1.0, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1, 1000, 100, 0, 400_000_000)


def _linear(case: Case) -> Run:
    """Return a run whose phases all take the same time per layer."""
    phase = 0.01 * case.layers
    return replace(
        _RUN, lower=phase, dependencies=phase, schedule=phase, counters=phase, verify=4 * phase
    )


def _measured(changes: dict[Case, dict[str, Any]] | None = None) -> Measured:
    changes = changes or {}
    runs = {case: [replace(_linear(case), **changes.get(case, {}))] * 3 for case in CASES}
    return Measured("critical-path", runs)


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (_measured(), True),
        (_measured({MANY: {"verify": 2.1}}), False),
        (_measured({MANY: {"lower": 2.5}}), False),
        (_measured({CASES[-1]: {"lower": 9.0}}), True),
        (_measured({CASES[-1]: {"lower": 12.0}}), False),
        (_measured({FEW: {"verify": 0.2}}), False),  # superlinear in the number of layers
        (_measured({CASES[1]: {"faults": 1}}), False),
    ],
)
def test_a_missed_target_is_missed(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_what_is_asked_for() -> None:
    limits = {case.preset: (case.tp, case.most_seconds, case.most_verify) for case in CASES}
    assert limits == {"qwen3-8b": (1, 4.0, 2.0), "qwen2.5-72b": (8, 15.0, None)}
    assert _measured().growth == pytest.approx(1.0)


def test_a_run_adds_up() -> None:
    run = run_cold("tiny-qwen3", 2, 1, "dynamic", "cpu")
    phases = run.lower, run.dependencies, run.schedule, run.counters, run.verify
    assert min(phases) > 0 and run.all == pytest.approx(sum(phases))
    assert run.faults == 0 and run.instructions > 30 and run.peak_bytes > 1e8
    longer = run_cold("tiny-qwen3", 2, 2, "dynamic", "cpu")
    assert longer.instructions > run.instructions


@pytest.mark.parametrize("slow", [False, True])
def test_prints_the_table_and_says_what_is_missed(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = _measured({MANY: {"verify": 3.0}} if slow else {})
    monkeypatch.setattr(schedule, "measure", lambda *arguments: measured)
    assert main([]) == int(slow)
    shown = capsys.readouterr().out
    assert "qwen2.5-72b tp=8, 80 layers" in shown and "verify" in shown
    assert ("MISSED" in shown) is slow
    assert main(["--json"]) == int(slow)
    assert json.loads(capsys.readouterr().out)["ok"] is not slow


def test_a_policy_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--policy", "rounds"])
    assert exit.value.code == 2
    assert "critical-path" in capsys.readouterr().err
