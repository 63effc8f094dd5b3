"""The trace follows the format's rules, and shows every instruction, load and dependency."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.inspect.schedules import ranked, step_timeline
from tests.inspect.trace_format import Event, check_trace, problems, read_trace
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.trace import trace_events, write_trace
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.measured import MeasuredStep

Events = list[Event]


def read(timeline: Timeline, measured: MeasuredStep | None = None) -> Events:
    file = io.StringIO()
    write_trace(timeline, "a <title>", file, measured)
    return read_trace(file.getvalue())


def of(events: Events, phase: str, cat: str = "") -> Events:
    return [e for e in events if e["ph"] == phase and (not cat or e["cat"] == cat)]


def both(timeline: Timeline) -> Events:
    """Return a trace of a step and of its copy, taken half a µs before it is ready."""
    begins = tuple(max(0.0, start - 0.5) for start in timeline.timing.starts)
    return read(timeline, MeasuredStep(begins, timeline.timing))


@pytest.mark.parametrize("policy", ["round-robin", "critical-path", "dynamic"])
def test_every_instruction_and_arrow(policy: str) -> None:
    timeline = step_timeline(3, 4, policy)
    events = read(timeline)
    assert len(of(events, "X", "instruction")) == len(timeline.program.instructions)
    waiting = sum(bool(waits) for waits in timeline.program.waits)
    assert len(of(events, "s")) == len(of(events, "f")) == waiting
    kinds = [event["ph"] for event in events]
    assert kinds.index("s") > max(place for place, kind in enumerate(kinds) if kind in "MXC")


def test_moments_between_nanoseconds() -> None:
    """Slices do not overlap at times that are not whole nanoseconds."""
    timeline = step_timeline(3, 4)
    third = 1 / 3 + 1e-5
    timing = Timing(
        tuple(start * third for start in timeline.timing.starts),
        tuple(finish * third for finish in timeline.timing.finishes),
        timeline.timing.idle,
        timeline.timing.workers,
    )
    read(Timeline(timeline.program, timing))


def test_ids_and_names_of_ranks_and_workers() -> None:
    """Ids start at 1, and no two threads of all ranks and steps have the same one."""
    timeline = ranked(2, 2, 2)
    events = both(timeline)
    names = {
        (e["name"], e["pid"], e["tid"]): next(iter(e["args"].values())) for e in of(events, "M")
    }
    processes = {key[1]: name for key, name in names.items() if key[0] == "process_name"}
    assert processes == {
        1: "rank 0, simulated",
        3: "rank 1, simulated",
        5: "critical path, simulated",
        6: "rank 0, measured",
        8: "rank 1, measured",
        10: "critical path, measured",
    }
    threads = {key[1:]: name for key, name in names.items() if key[0] == "thread_name"}
    assert threads[3, 3] == "worker 0" and threads[3, 4] == "worker 1"
    assert {key[1] for key in threads} == set(range(1, 11))
    order = {key[1]: place for key, place in names.items() if key[0] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [5, 1, 3, 10, 6, 8]
    assert {(e["pid"], e["tid"]) for e in of(events, "X")} == threads.keys()
    alone = {e["args"]["name"] for e in read(timeline) if e["name"] == "process_name"}
    assert alone == {"rank 0", "rank 1", "critical path"}


def test_what_a_slice_tells() -> None:
    """The name of a slice is the kind; the arguments have the details."""
    timeline = step_timeline(2, 3)
    label = 'layer 1 attention & "2"'
    slices = of(read(timeline), "X", "instruction")
    event = next(e for e in slices if e["args"]["label"] == label)
    number = event["args"].pop("instruction")
    assert timeline.program.instructions[number].label == label
    waits, signals = timeline.program.waits[number], timeline.program.signals[number]
    assert event["args"] == {
        "label": label,
        "layer": 1,
        "cost_us": 3.25,
        "reads": "q<k>&v[2:3]",
        "writes": "attended[2:3]",
        "waits": ", ".join(f"counter {w.counter} ≥ {w.until}" for w in waits),
        "signals": ", ".join(f"counter {counter}" for counter in signals),
    }
    assert (event["name"], event["dur"]) == ("partial_attention", 3.25)
    kinds = {instruction.name for instruction in timeline.program.instructions}
    assert {e["name"] for e in slices} == kinds


def test_the_arrow_comes_from_who_released_it() -> None:
    timeline = step_timeline(2, 3)
    events = read(timeline)
    slices = {e["args"]["instruction"]: e for e in of(events, "X", "instruction")}
    for event in of(events, "s") + of(events, "f"):
        late = event["id"] - 1
        number = timeline.released_by[late] if event["ph"] == "s" else late
        assert number is not None
        start, finish = (slices[number][key] for key in ("ts", "dur"))
        assert start <= event["ts"] < start + finish
        assert event["tid"] == slices[number]["tid"]


def test_the_critical_path_has_a_track() -> None:
    timeline = step_timeline(3, 4)
    path = of(read(timeline), "X", "critical path")
    assert tuple(e["args"]["instruction"] for e in path) == timeline.chain
    assert len({e["tid"] for e in path}) == 1
    assert sum(e["dur"] for e in path) == pytest.approx(timeline.timing.makespan)


def test_a_measured_critical_path_may_overlap() -> None:
    """A signal precedes the moment that counts as the end, so an instruction may start early."""
    timeline = step_timeline(3, 4)
    chain = timeline.chain
    starts = list(timeline.timing.starts)
    early = starts[chain[5]] - 0.25
    starts[chain[5]] = early
    apart = dataclasses.replace(
        timeline.timing,
        starts=tuple(starts),
        idle=(0.0,) * len(starts),
        workers=tuple(range(len(starts))),
    )
    events = read(timeline, MeasuredStep(apart.starts, apart))
    path = {e["args"]["instruction"]: e for e in of(events, "X", "critical path")}
    assert path[chain[5]]["ts"] == pytest.approx(early + 0.25)


@pytest.mark.parametrize("timeline", [step_timeline(3, 4), ranked(2, 2, 2)])
def test_counters_add_up(timeline: Timeline) -> None:
    """The area below a counter is the work, and the bytes, of the rank's instructions."""
    loads = tuple(
        dataclasses.replace(instruction, traffic=1000 * (1 + number % 7))  # type: ignore[type-var]
        for number, instruction in enumerate(timeline.program.instructions)
    )
    timeline = Timeline(dataclasses.replace(timeline.program, instructions=loads), timeline.timing)
    timing, ranks = timeline.timing, timeline.program.ranks
    workers = len(timeline.tracks) // ranks
    events = read(timeline)
    for rank in range(ranks):
        numbers = [n for n, worker in enumerate(timing.workers) if worker // workers == rank]
        samples = [e for e in of(events, "C") if e["pid"] == 1 + workers * rank]
        areas = {
            name: area([e for e in samples if e["name"] == name]) for name in ("loads", "workers")
        }
        assert areas["workers"] == pytest.approx(sum(timing.costs[n] for n in numbers), rel=1e-3)
        assert areas["loads"] == pytest.approx(sum(loads[n].traffic for n in numbers), rel=1e-3)  # type: ignore[attr-defined]
    assert all(0 <= value <= workers for value in busy(events))
    last = {e["name"]: e for e in of(events, "C")}
    assert all(list(e["args"].values()) == [0] for e in last.values())


def busy(events: Events) -> list[float]:
    return [e["args"]["busy"] for e in of(events, "C") if e["name"] == "workers"]


def area(samples: Events) -> float:
    return sum(
        next(iter(early["args"].values())) * (late["ts"] - early["ts"])
        for early, late in pairwise(samples)
    )


def test_an_idle_rank_has_flat_counters() -> None:
    timeline = step_timeline(1, 2)
    two = dataclasses.replace(timeline.program, ranks=2)
    wide = dataclasses.replace(
        timeline.timing, idle=(0.0,) * 4, workers=tuple(w for w in timeline.timing.workers)
    )
    events = [e for e in trace_events(Timeline(two, wide)) if e["ph"] == "C" and e["pid"] == 3]
    assert Counter(e["name"] for e in events) == {"loads": 1, "workers": 1}


Change = Callable[[Events], Any]


def first(events: Events, phase: str, place: int = 0) -> Event:
    return of(events, phase)[place]


def moved(phase: str, place: int = 0, **fields: Any) -> Change:
    """Return a mistake: other fields of an event."""
    return lambda events: first(events, phase, place).update(fields)


def without(phase: str, place: int = 0) -> Change:
    return lambda events: events.remove(first(events, phase, place))


def twice(phase: str) -> Change:
    return lambda events: events.append(dict(first(events, phase)))


def no_field(phase: str, field: str) -> Change:
    return lambda events: first(events, phase).pop(field)


def longer(events: Events) -> None:
    """Let the first slice of a worker with two end after the second one has started."""
    by_thread: dict[int, Events] = {}
    for event in of(events, "X", "instruction"):
        by_thread.setdefault(event["tid"], []).append(event)
    slices = sorted(next(iter(by_thread.values())), key=lambda e: e["ts"])
    slices[0]["dur"] += slices[1]["dur"] / 2


def exchanged(events: Events) -> None:
    """Exchange the moments of two samples."""
    early, late = first(events, "C", 1), first(events, "C", 2)
    early["ts"], late["ts"] = late["ts"], early["ts"]


def same_name(events: Events) -> None:
    names = [e for e in events if e["name"] == "process_name"]
    names[1]["args"] = names[0]["args"]


def backwards(events: Events) -> None:
    """Exchange the two ends of a flow."""
    early, late = first(events, "s"), first(events, "f")
    for key in ("ts", "pid", "tid"):
        early[key], late[key] = late[key], early[key]


MISTAKES: dict[str, tuple[Change, str]] = {
    "phase": (moved("X", ph="B"), "unknown phase"),
    "no pid": (no_field("X", "pid"), "missing or unknown fields"),
    "no tid of a counter": (no_field("C", "tid"), "missing or unknown fields"),
    "no id": (no_field("s", "id"), "missing or unknown fields"),
    "an unknown field": (moved("X", dut=1.0), "missing or unknown fields"),
    "pid 0": (moved("X", pid=0), "pid must be an integer of at least 1"),
    "tid 0": (moved("M", tid=0), "tid must be an integer of at least 1"),
    "id 0": (moved("f", id=0), "id must be an integer of at least 1"),
    "a pid in text": (moved("X", pid="1"), "pid must be an integer"),
    "no name": (moved("X", name=""), "name must be text"),
    "a negative moment": (moved("X", ts=-1.0), "ts must be a number of at least 0"),
    "a negative duration": (moved("X", dur=-1.0), "dur must be a number of at least 0"),
    "picoseconds": (moved("X", ts=0.0005), "ts must be whole nanoseconds"),
    "arguments in a list": (moved("X", args=[]), "args must be an object"),
    "the next slice": (moved("f", bp="n"), "bp must be e"),
    "metadata": (moved("M", name="process_title"), "unknown metadata"),
    "a name that is a number": (moved("M", args={"name": 1}), "unknown metadata"),
    "a counter in text": (moved("C", args={"busy": "1"}), "must be finite numbers"),
    "an infinite counter": (moved("C", args={"busy": float("inf")}), "must be finite numbers"),
    "a counter without a value": (moved("C", args={}), "must be finite numbers"),
    "a thread of two processes": (moved("X", -1, pid=1), "is in the processes"),
    "a process of its own": (moved("C", pid=99, tid=98), "pid 99 has no thread with its id"),
    "a process without a name": (without("M"), "has no name before"),
    "a thread without a place": (without("M", 3), "has no sort_index before"),
    "two names of a process": (twice("M"), "is given twice"),
    "one name of two processes": (same_name, "have the same name"),
    "crossing slices": (longer, "crosses the end of another one"),
    "a start without an end": (without("f"), "must have one start and one end"),
    "an end without a start": (without("s"), "must have one start and one end"),
    "two ends": (twice("f"), "must have one start and one end"),
    "another id": (moved("f", id=10_000), "must have one start and one end"),
    "another category": (moved("f", cat="other"), "must have one start and one end"),
    "an end outside": (moved("f", ts=1e6), "the end of a flow is outside of slices"),
    "a start at the end": (moved("s", ts=1e6), "the end of a flow is outside of slices"),
    "backwards": (backwards, "ends before it starts"),
    "samples out of order": (exchanged, "out of order"),
    "another series": (moved("C", 1, args={"other": 1}), "the series of a counter change"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name: str) -> None:
    """The rules of the format are checked: each mistake breaks the one that it is for."""
    events = copy.deepcopy(both(ranked(2, 2, 2)))
    check_trace(events)
    change, message = MISTAKES[name]
    change(events)
    assert any(message in problem for problem in problems(events)), list(problems(events))
