"""Tests of the figures of a schedule."""

from __future__ import annotations

import pytest

from tests.inspect.schedules import step_timeline
from tpcompile.inspect import schedule
from tpcompile.inspect.schedule import ScheduleReport, fault_lines
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.proof.fault import Fault
from tpcompile.vm.schedule.scheduled import Scheduled
from tpcompile.vm.targets import TARGETS


def report(*faults: Fault) -> ScheduleReport:
    timeline = step_timeline(2, 3)
    costs = tuple(step.cost for step in timeline.program.instructions)
    options = {"model": "tiny", "max_seq_len": 4096}
    clock = None if faults else timeline.timing
    seconds = {"verify": 0.5}
    return ScheduleReport(
        options,
        Scheduled(
            timeline.program,
            costs,
            9.25,
            faults,
            clock,
            seconds,
            TARGETS["cpu"],
            tuple(Parts(cost, 0, 0.0) for cost in costs),
        ),
    )


def test_kinds_are_counted_and_added_up() -> None:
    record = report().to_json()
    assert record["kinds"] == [
        {"kind": "embed", "count": 1, "us": 0.5},
        {"kind": "norm_qkv_rows", "count": 8, "us": 16.0},
        {"kind": "partial_attention", "count": 8, "us": 22.0},
        {"kind": "linear_residual", "count": 12, "us": 18.0},
        {"kind": "argmax", "count": 1, "us": 0.75},
    ]
    busy = sum(kind["us"] for kind in record["kinds"])
    assert record["idle"] == pytest.approx(1 - busy / (3 * record["makespan_us"]), abs=1e-6)
    assert record["idle_us"] == [round(us, 3) for us in step_timeline(2, 3).timing.idle]
    assert sum(record["idle_us"]) == pytest.approx(3 * record["makespan_us"] - busy, abs=0.01)
    assert record["seconds"] == {"verify": 0.5}
    bandwidth = record["bandwidth"]
    spent = bandwidth["floor_us"] + sum(bandwidth["lost_us"].values())
    assert spent == pytest.approx(record["makespan_us"], abs=0.01)


def test_the_chain_that_the_end_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = step_timeline(2, 3)
    labels = [timeline.program.instructions[number].label for number in timeline.chain]
    assert report().to_json()["critical_path"] == {"count": len(labels), "labels": labels}
    monkeypatch.setattr(schedule, "_MOST_LABELS", 2)
    assert report().to_json()["critical_path"] == {"count": len(labels), "labels": labels[:2]}


def test_a_program_with_faults_has_no_time() -> None:
    refused = report(Fault("order", "a can come before b"))
    data = refused.to_json()
    assert (data["verified"], data["makespan_us"], data["idle"]) == (False, None, None)
    assert (data["idle_us"], data["critical_path"]) == (None, None)
    assert data["bandwidth"]["lost_us"] is None
    assert data["errors"] == [{"rule": "order", "got": "a can come before b"}]
    table = refused.table()
    assert "NO: 1 fault" in table and "  order: a can come before b\n" in table
    assert "makespan" not in table


def test_the_table_of_a_good_one() -> None:
    table = report().table()
    for words in ("max seq len", "4,096", "9.2 µs", "yes", "22.0", "38.4%", "where the time goes"):
        assert words in table


def test_of_many_faults_the_first() -> None:
    lines = fault_lines([Fault("order", f"fault {number}") for number in range(1200)])
    assert lines.count("\n") == 11
    assert lines.endswith("  order: fault 9\n  not shown: 1,190 faults\n")
