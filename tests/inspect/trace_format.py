"""The rules of the trace-event format, and those of its viewers, for the phases that traces use.

The format is Google's "Trace Event Format", in its JSON object form.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]

FIELDS: Mapping[str, set[str]] = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
}
"""The fields of an event of each phase."""

METADATA: Mapping[str, tuple[str, type]] = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
"""The argument of each metadata event."""


def read_trace(text: str) -> list[Event]:
    """Parse a trace, assert that it follows the rules, and return its events."""
    trace = json.loads(text, parse_constant=_refuse_constant)
    assert list(trace) == ["displayTimeUnit", "otherData", "traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    events: list[Event] = trace["traceEvents"]
    check_trace(events)
    return events


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_trace(events: list[Event]) -> None:
    messages = list(problems(events))
    assert not messages, "\n".join(messages[:20])


def problems(events: list[Event]) -> Iterator[str]:
    """Yield every rule that a trace breaks. Later rules need valid fields."""
    fields = [message for event in events for message in _fields(event)]
    if fields:
        yield from fields
        return
    for rule in (_ids, _names, _nesting, _flows, _counters):
        yield from rule(events)


def _fields(event: Event) -> Iterator[str]:
    """Check the fields of one event, and their types."""
    phase = event.get("ph")
    if phase not in FIELDS:
        yield f"unknown phase: {event}"
        return
    if set(event) != FIELDS[phase]:
        yield f"missing or unknown fields {sorted(set(event) ^ FIELDS[phase])}: {event}"
        return
    for keys, valid, expected in VALUES:
        for key in keys:
            if key in event and not valid(event[key]):
                yield f"{key} must be {expected}: {event}"
                return
    if phase == "M":
        key, kind = METADATA.get(event["name"], ("", object))
        if list(event["args"]) != [key] or not isinstance(event["args"][key], kind):
            yield f"unknown metadata: {event}"
    if phase == "C" and not (event["args"] and all(map(_number, event["args"].values()))):
        yield f"the values of a counter must be finite numbers: {event}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _moment(value: Any) -> bool:
    return _number(value) and value >= 0


def _in_nanoseconds(microseconds: float) -> bool:
    return abs(microseconds * 1000 - round(microseconds * 1000)) < 1e-3


VALUES: Sequence[tuple[tuple[str, ...], Callable[[Any], bool], str]] = (
    (("name", "cat"), lambda value: isinstance(value, str) and bool(value), "text"),
    (("pid", "tid", "id"), _id, "an integer of at least 1"),
    (("ts", "dur"), _moment, "a number of at least 0"),
    (("ts", "dur"), _in_nanoseconds, "whole nanoseconds"),
    (("bp",), lambda value: value == "e", "e"),
    (("args",), lambda value: isinstance(value, dict), "an object"),
)
"""Fields, the test of their values, and its description."""


def _ids(events: list[Event]) -> Iterator[str]:
    """Ids are unique as on Linux: a thread is in one process, whose id is that of a thread in it.

    A counter has no thread, but viewers make one of its ids.
    """
    places: dict[int, set[int]] = defaultdict(set)
    for event in events:
        places[event["tid"]].add(event["pid"])
    for thread, processes in places.items():
        if len(processes) > 1:
            yield f"tid {thread} is in the processes {sorted(processes)}"
    for process in {event["pid"] for event in events}:
        if places.get(process) != {process}:
            yield f"pid {process} has no thread with its id"


def _names(events: list[Event]) -> Iterator[str]:
    """Every process and every thread has one name and one place, given before it is used."""
    counts: Counter[tuple[str, int]] = Counter()
    texts: dict[str, int] = {}
    for event in events:
        numbers = {"process": event["pid"], "thread": event["tid"]}
        if event["ph"] == "M":
            kind = event["name"].partition("_")[0]
            counts[event["name"], numbers[kind]] += 1
            if event["name"] == "process_name":
                first = texts.setdefault(event["args"]["name"], event["pid"])
                if first != event["pid"]:
                    yield f"the processes {first} and {event['pid']} have the same name"
            continue
        for kind, number in numbers.items():
            for field in ("name", "sort_index"):
                if not counts[f"{kind}_{field}", number]:
                    counts[f"{kind}_{field}", number] = 1
                    yield f"the {kind} {number} has no {field} before {event}"
    yield from (
        f"{kind} of {number} is given twice" for (kind, number), n in counts.items() if n > 1
    )


def _slices(events: list[Event]) -> dict[int, list[Event]]:
    """Return the slices of each thread, outer ones before inner ones."""
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["tid"]].append(event)
    for slices in by_thread.values():
        slices.sort(key=lambda e: (_start(e), -_end(e)))
    return by_thread


def _nesting(events: list[Event]) -> Iterator[str]:
    """Check that a slice is inside the slice that is open at its start, if there is one."""
    for slices in _slices(events).values():
        open_until: list[int] = []
        for event in slices:
            while open_until and open_until[-1] <= _start(event):
                open_until.pop()
            if open_until and _end(event) > open_until[-1]:
                yield f"a slice crosses the end of another one: {event}"
            open_until.append(_end(event))


def _flows(events: list[Event]) -> Iterator[str]:
    """Flows have one start and one end each, in order, and both are inside slices."""
    slices = _slices(events)
    ends: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["cat"], event["name"], event["id"]].append(event)
            thread_slices = slices.get(event["tid"], [])
            moment = _start(event)
            if not any(_start(e) <= moment < _end(e) for e in thread_slices):
                yield f"the end of a flow is outside of slices: {event}"
    for flow, pair in ends.items():
        if [event["ph"] for event in pair] != ["s", "f"]:
            yield f"a flow must have one start and one end: {flow}"
        elif _start(pair[0]) >= _start(pair[1]):
            yield f"a flow ends before it starts: {flow}"


def _counters(events: list[Event]) -> Iterator[str]:
    """Check that the samples of a counter are in order, each with the same series."""
    by_counter: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            by_counter[event["pid"], event["name"]].append(event)
    for counter, samples in by_counter.items():
        for early, late in pairwise(samples):
            if _start(early) >= _start(late):
                yield f"the samples of a counter are out of order: {counter}, {late}"
            if early["args"].keys() != late["args"].keys():
                yield f"the series of a counter change: {counter}, {late}"


def _start(event: Event) -> int:
    return round(event["ts"] * 1000)


def _end(event: Event) -> int:
    return _start(event) + round(event["dur"] * 1000)
