"""Measured and simulated steps side by side: the trace has both, the table sums both."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest

from tests.inspect.schedules import step_timeline
from tests.inspect.trace_format import check_trace, read_trace
from tests.vm.schedule.test_measured import times_of
from tpcompile.inspect.step_trace import StepTrace
from tpcompile.vm.schedule.clock import timing
from tpcompile.vm.schedule.measured import MeasuredSteps, measured_step


def made(policy: str = "critical-path") -> StepTrace:
    """Return a step that was measured twice, in half of the predicted time."""
    timeline = step_timeline(3, 3, policy)
    costs = tuple(instruction.cost * 2 for instruction in timeline.program.instructions)  # type: ignore[attr-defined]
    step = measured_step(timeline.program, times_of(timeline.timing))
    simulated = timing(timeline.program, costs)
    return StepTrace("a <title>", simulated, MeasuredSteps(timeline.program, [step, step]))


def events_of(trace: StepTrace) -> list[dict[str, Any]]:
    file = io.StringIO()
    trace.write(file)
    return read_trace(file.getvalue())


def check_both(events: list[dict[str, Any]], instructions: int, ranks: int = 1) -> None:
    """Check that both tracks have every instruction, and that measured ones begin, wait, end."""
    check_trace(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = next(pid for pid, name in names.items() if name == "critical path, simulated") - 1
    workers = threads // ranks
    assert names == {
        first + pid: f"{name}, {side}"
        for first, side in ((1, "simulated"), (2 + threads, "measured"))
        for pid, name in [
            *((workers * rank, f"rank {rank}") for rank in range(ranks)),
            (threads, "critical path"),
        ]
    }
    slices = [e for e in events if e["ph"] == "X" and e["cat"] == "instruction"]
    sides_of = Counter(e["pid"] > 1 + threads for e in slices)
    assert sides_of == {False: instructions, True: instructions}
    for event in slices:
        arguments = event["args"]
        assert ("begin_us" in arguments) == (event["pid"] > 1 + threads)
        if event["pid"] > 1 + threads:
            ready = arguments["begin_us"] + arguments["wait_us"]
            assert 0 <= arguments["begin_us"] <= ready <= arguments["end_us"]
            assert ready == pytest.approx(event["ts"], abs=2e-3)
            assert arguments["end_us"] == pytest.approx(event["ts"] + event["dur"], abs=2e-3)
    waits = [e for e in events if e["ph"] == "X" and e["cat"] == "wait"]
    assert all(e["pid"] > 1 + threads for e in waits)
    ends = {(e["pid"], e["args"]["instruction"]): e["ts"] for e in slices}
    for event in waits:
        ready = ends[event["pid"], event["args"]["instruction"]]
        assert event["ts"] + event["dur"] == pytest.approx(ready)


@pytest.mark.parametrize("policy", ["critical-path", "dynamic"])
def test_the_trace_has_both(policy: str) -> None:
    trace = made(policy)
    events = events_of(trace)
    check_both(events, len(trace.program.instructions))
    assert any(e["ph"] == "X" and e["cat"] == "wait" for e in events)


def test_the_sums_of_both() -> None:
    trace = made()
    sums = trace.to_json()
    assert (sums["steps"], sums["ratio"]) == (2, 2.0)
    assert sums["predicted_us"] == pytest.approx(2 * sums["measured_us"])
    assert sum(kind["count"] for kind in sums["kinds"]) == len(trace.program.instructions)
    for kind in sums["kinds"]:
        assert kind["predicted_us"] == pytest.approx(2 * kind["measured_us"])
    assert sum(kind["wait_us"] for kind in sums["kinds"]) > 0


def test_the_table() -> None:
    text = made().table()
    assert max(map(len, text.splitlines())) <= 80
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    ratios = {row[0]: row[4] for row in rows}
    assert list(ratios)[-1] == "step"
    assert set(ratios.values()) == {"2.00"}
