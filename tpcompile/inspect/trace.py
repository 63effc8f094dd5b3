"""A timed program as a Perfetto trace: tracks for workers, slices for instructions, and arrows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tpcompile.inspect.timeline import Timeline, Track, layer_of
from tpcompile.vm.program import Program, Region
from tpcompile.vm.program.region import box_text
from tpcompile.vm.schedule.measured import MeasuredStep

Event = dict[str, Any]


def write_trace(
    timeline: Timeline, title: str, file: TextIO, measured: MeasuredStep | None = None
) -> None:
    """Write the trace as JSON, one event per line.

    A measured step of the program has processes of its own, after those of the simulated one.
    """
    heading = json.dumps({"title": title}, ensure_ascii=False)
    file.write(f'{{"displayTimeUnit": "ns", "otherData": {heading}, "traceEvents": [')
    for number, event in enumerate(trace_events(timeline, measured)):
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        file.write(",\n" + text if number else "\n" + text)
    file.write("\n]}\n")


def trace_events(timeline: Timeline, measured: MeasuredStep | None = None) -> Iterator[Event]:
    """Yield names, then slices, then arrows. A viewer needs the slices before their arrows."""
    count = len(timeline.program.instructions)
    yield from _names(timeline.tracks, "" if measured is None else ", simulated")
    if measured is not None:
        own = Timeline(timeline.program, measured.timing)
        places = [Track(track.rank + own.program.ranks, track.worker) for track in own.tracks]
        yield from _names(places, ", measured", own.program.ranks)
    for number in range(count):
        yield _slice(timeline, number, timeline.tracks)
    if measured is not None:
        for number in range(count):
            yield from _measured_slices(own, measured, number, places)
    for number, early in enumerate(timeline.released_by):
        if early is not None:
            yield from _arrow(timeline, early, number)


def _names(tracks: Sequence[Track], suffix: str, first: int = 0) -> Iterator[Event]:
    """Yield the names of tracks, whose processes are numbered from `first`."""

    def named(kind: str, key: str, value: str | int, track: Track, worker: int) -> Event:
        return {
            "name": kind,
            "ph": "M",
            "ts": 0,
            "pid": track.rank,
            "tid": worker,
            "args": {key: value},
        }

    for track in tracks:
        if track.worker == 0:
            yield named("process_name", "name", f"rank {track.rank - first}{suffix}", track, 0)
            yield named("process_sort_index", "sort_index", track.rank, track, 0)
        yield named("thread_name", "name", f"worker {track.worker}", track, track.worker)
        yield named("thread_sort_index", "sort_index", track.worker, track, track.worker)


def _slice(timeline: Timeline, number: int, tracks: Sequence[Track]) -> Event:
    instruction = timeline.program.instructions[number]
    start, finish = _nanoseconds(timeline, number)
    track = tracks[timeline.timing.workers[number]]
    return {
        "name": instruction.label,
        "cat": instruction.name,
        "ph": "X",
        "ts": start / 1000,
        "dur": (finish - start) / 1000,
        "pid": track.rank,
        "tid": track.worker,
        "args": _arguments(timeline, number),
    }


def _measured_slices(
    timeline: Timeline, measured: MeasuredStep, number: int, tracks: Sequence[Track]
) -> Iterator[Event]:
    """Yield the wait of an instruction, if there was one, and its execution."""
    begin = measured.begins[number]
    ready, end = (moments[number] for moments in (timeline.timing.starts, timeline.timing.finishes))
    found = _slice(timeline, number, tracks)
    first = round(begin * 1000)
    if first < round(ready * 1000):
        yield {
            **found,
            "name": "wait",
            "cat": "wait",
            "ts": first / 1000,
            "dur": (round(ready * 1000) - first) / 1000,
            "args": {"instruction": number},
        }
    own = {"begin_us": begin, "wait_us": ready - begin, "end_us": end}
    rounded = {name: round(value, 3) for name, value in own.items()}
    yield {**found, "args": found["args"] | rounded}


def _arguments(timeline: Timeline, number: int) -> Event:
    program, timing = timeline.program, timeline.timing
    instruction = program.instructions[number]
    return {
        "instruction": number,
        "kind": instruction.name,
        "layer": layer_of(instruction),
        "cost_us": round(timing.finishes[number] - timing.starts[number], 3),
        "reads": ", ".join(_said(program, region) for region in instruction.reads),
        "writes": ", ".join(_said(program, region) for region in instruction.writes),
        "waits": ", ".join(f"counter {w.counter} ≥ {w.until}" for w in program.waits[number]),
        "signals": ", ".join(f"counter {counter}" for counter in program.signals[number]),
    }


def _said(program: Program, region: Region) -> str:
    return program.buffers[region.buffer].name + box_text(region.box)


def _arrow(timeline: Timeline, early: int, late: int) -> Iterator[Event]:
    """Yield an arrow from the last moment inside the early slice to the start of the late one."""
    start, finish = _nanoseconds(timeline, early)
    ends = ((early, "s", max(start, finish - 1)), (late, "f", _nanoseconds(timeline, late)[0]))
    for number, end, moment in ends:
        track = timeline.tracks[timeline.timing.workers[number]]
        event = {
            "name": "wait",
            "cat": "wait",
            "ph": end,
            "id": late,
            "ts": moment / 1000,
            "pid": track.rank,
            "tid": track.worker,
        }
        yield event if end == "s" else {**event, "bp": "e"}  # the enclosing slice, not the next


def _nanoseconds(timeline: Timeline, number: int) -> tuple[int, int]:
    """Return start and finish, rounded so that neighbours on a track meet and never overlap."""
    timing = timeline.timing
    return round(timing.starts[number] * 1000), round(timing.finishes[number] * 1000)
