"""The explorer benchmark reports missed targets, and measures both sides with the same work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import explorer
from benchmarks.explorer import CASES, Measured, Run, Used, main, run_child

SMALL, LARGE = CASES
_USED = Used(0.5, 0.8, {"fuse-qkv": 40.0, "cache-kv": 90.0}, [16.7] * 100, [4.0] * 100, True)
_RUN = Run({"stages": 1.0, "schedule": 2.0}, 9.2, 6.0, 3.5, 2000, _USED)


def _measured(run: Run = _RUN) -> Measured:
    return Measured({SMALL: [_RUN] * 3, LARGE: [run] * 3})


def _used(**changes: Any) -> Measured:
    return _measured(replace(_RUN, used=replace(_USED, **changes)))


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (_measured(), True),
        (_measured(replace(_RUN, mb=15.9)), True),
        (_measured(replace(_RUN, mb=16.1)), False),
        (_measured(replace(_RUN, parts={"stages": 5.1})), False),
        (_used(view_seconds=1.4), True),
        (_used(view_seconds=1.6), False),
        (_used(choices={"fuse-qkv": 10.0, "cache-kv": 151.0}), False),
        (_used(frames=[16.7] * 96 + [60.0] * 4), True),
        (_used(frames=[16.7] * 90 + [60.0] * 10), False),
        (_used(totals_equal=False), False),
    ],
)
def test_a_missed_target_is_missed(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_what_is_asked_for() -> None:
    limits = {case.name: (case.most_mb, case.most_view_seconds) for case in CASES}
    assert limits == {"qwen3-0.6b tp=2": (4.0, 1.0), "qwen2.5-72b tp=8": (16.0, 1.5)}
    assert _RUN.make == 3.0


@pytest.mark.parametrize("slow", [False, True])
def test_prints_the_table_and_says_what_is_missed(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = _used(view_seconds=3.0) if slow else _measured()
    monkeypatch.setattr(explorer, "measure", lambda *arguments: measured)
    assert main([]) == int(slow)
    shown = capsys.readouterr().out
    assert "qwen2.5-72b tp=8" in shown and "Schedule view" in shown
    assert ("MISSED" in shown) is slow
    assert main(["--json"]) == int(slow)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not slow
    assert report["cases"]["qwen3-0.6b tp=2"][0]["make"] == 3.0


def test_both_sides(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    page = run_child("page", "tiny-qwen3", 2, output)
    plain = run_child("plain", "tiny-qwen3", 2, output)
    assert set(page["parts"]) == {"stages", "plan", "modules", "schedule", "writing"}
    assert 0 < sum(page["parts"].values()) < page["seconds"]
    assert plain["seconds"] > 0
    assert plain["instructions"] > 100 and output.stat().st_size > 100_000


def test_the_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def measured(case: object, page_first: bool) -> Run:
        order.append(page_first)
        return _RUN

    monkeypatch.setattr(explorer, "measure_case", measured)
    assert main(["--runs", "3", "--case", "qwen3-0.6b"]) == 0
    assert order == [True, False, True]
