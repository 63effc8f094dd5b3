"""The trace meets the rules of Perfetto's importer: slices nest, and arrows start inside them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.inspect.schedules import step_timeline
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.trace import trace_events, write_trace
from tpcompile.vm.schedule.clock import Timing

Events = list[dict[str, Any]]

KEYS = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
}


def read(timeline: Timeline) -> Events:
    file = io.StringIO()
    write_trace(timeline, "a <title>", file)
    found = json.loads(file.getvalue())
    assert found["otherData"] == {"title": "a <title>"}
    events: Events = found["traceEvents"]
    return events


def check_trace(events: Events) -> None:
    """Assert the format's rules for single events, for slices and for arrows."""
    for event in events:
        assert set(event) == KEYS[event["ph"]]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        assert event["ts"] >= 0
    slices = [e for e in events if e["ph"] == "X"]
    tracks: dict[tuple[int, int], Events] = {}
    for event in slices:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        track.sort(key=lambda e: e["ts"])
        for early, late in pairwise(track):
            assert nanoseconds(early["ts"]) + nanoseconds(early["dur"]) <= nanoseconds(late["ts"])
    arrows = {ph: {e["id"]: e for e in events if e["ph"] == ph} for ph in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys()
    assert len(arrows["s"]) * 2 == sum(e["ph"] in "sf" for e in events)
    for number, end in arrows["f"].items():
        assert end["bp"] == "e"
        start = arrows["s"][number]
        assert nanoseconds(start["ts"]) < nanoseconds(end["ts"])
        for arrow in (start, end):
            around = [e for e in tracks[arrow["pid"], arrow["tid"]] if inside(arrow, e)]
            assert len(around) == 1, arrow


def nanoseconds(microseconds: float) -> int:
    assert microseconds * 1000 == pytest.approx(round(microseconds * 1000), abs=1e-3)
    return round(microseconds * 1000)


def inside(arrow: dict[str, Any], event: dict[str, Any]) -> bool:
    moment, start = nanoseconds(arrow["ts"]), nanoseconds(event["ts"])
    return start <= moment < start + nanoseconds(event["dur"])


@pytest.mark.parametrize("policy", ["round-robin", "critical-path", "dynamic"])
def test_schema(policy: str) -> None:
    timeline = step_timeline(3, 4, policy)
    events = read(timeline)
    check_trace(events)
    count = Counter(event["ph"] for event in events)
    assert count["X"] == len(timeline.program.instructions)
    assert count["s"] == count["f"] == sum(bool(own) for own in timeline.program.waits)
    kinds = [event["ph"] for event in events]
    assert kinds == sorted(kinds, key="MXsf".find) or kinds.index("s") > kinds.index("X")


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
    check_trace(read(Timeline(timeline.program, timing)))


def test_names_of_ranks_and_workers() -> None:
    one = step_timeline(2, 4)
    two = dataclasses.replace(one.program, ranks=2)
    names = [e for e in trace_events(Timeline(two, one.timing)) if e["ph"] == "M"]
    named = {(e["name"], e["pid"], e["tid"]): next(iter(e["args"].values())) for e in names}
    assert named["process_name", 1, 0] == "rank 1"
    assert named["thread_name", 1, 1] == "worker 1"
    assert len(named) == len(names) == 2 * (2 + 2 * 2)
    used = {(e["pid"], e["tid"]) for e in trace_events(Timeline(two, one.timing))}
    assert used == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_a_slice_tells() -> None:
    timeline = step_timeline(2, 3)
    event = next(e for e in read(timeline) if e["name"] == 'layer 1 attention & "2"')
    number = event["args"].pop("instruction")
    assert timeline.program.instructions[number].label == event["name"]
    waits, signals = timeline.program.waits[number], timeline.program.signals[number]
    assert event["args"] == {
        "kind": "partial_attention",
        "layer": 1,
        "cost_us": 3.25,
        "reads": "q<k>&v[2:3]",
        "writes": "attended[2:3]",
        "waits": ", ".join(f"counter {w.counter} ≥ {w.until}" for w in waits),
        "signals": ", ".join(f"counter {counter}" for counter in signals),
    }
    assert (event["cat"], event["dur"]) == ("partial_attention", 3.25)


def test_the_arrow_comes_from_who_released_it() -> None:
    timeline = step_timeline(2, 3)
    events = read(timeline)
    slices = {e["args"]["instruction"]: e for e in events if e["ph"] == "X"}
    for event in events:
        if event["ph"] == "s":
            early = timeline.released_by[event["id"]]
            assert early is not None
            assert inside(event, slices[early])
        if event["ph"] == "f":
            assert inside(event, slices[event["id"]])
