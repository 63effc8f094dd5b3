"""A timed program as a trace in Chrome's format: tracks for workers, slices for instructions.

Each rank is a process and each worker a thread, with ids as on Linux: a process has the id of its
first thread, and no two threads have the same id. Id 0 is not used, because viewers take it for the
idle process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TextIO

from tpcompile.inspect.rates import rates_of
from tpcompile.inspect.timeline import Timeline, layer_of
from tpcompile.vm.program import Program, Region
from tpcompile.vm.program.region import box_text
from tpcompile.vm.schedule.measured import MeasuredStep

Event = dict[str, Any]

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def write_trace(
    timeline: Timeline, title: str, file: TextIO, measured: MeasuredStep | None = None
) -> None:
    """Write the trace as JSON, one event per line.

    A measured step of the program has processes of its own, after those of the simulated one.
    """
    heading = json.dumps({"title": title}, ensure_ascii=False)
    file.write(f'{{"displayTimeUnit": "ns", "otherData": {heading}, "traceEvents": [')
    for number, event in enumerate(trace_events(timeline, measured)):
        file.write((",\n" if number else "\n") + _JSON.encode(event))
    file.write("\n]}\n")


def trace_events(timeline: Timeline, measured: MeasuredStep | None = None) -> Iterator[Event]:
    """Yield names, counters, slices, then arrows. A viewer needs the slices before their arrows."""
    simulated = _Side(timeline, 1, "" if measured is None else ", simulated")
    sides = [simulated]
    if measured is not None:
        measured_timeline = Timeline(timeline.program, measured.timing)
        sides.append(_Side(measured_timeline, simulated.chain_id + 1, ", measured"))
    for side in sides:
        yield from side.names()
    for side in sides:
        yield from side.counters()
        yield from side.chain()
    for number in range(len(timeline.program.instructions)):
        yield simulated.slice(number)
    if measured is not None:
        for number in range(len(timeline.program.instructions)):
            yield from _measured_slices(sides[-1], measured, number)
    for late, early in enumerate(timeline.released_by):
        if early is not None:
            yield from simulated.arrow(early, late)


@dataclass(frozen=True)
class _Side:
    """The processes of one step, simulated or measured."""

    timeline: Timeline
    first: int
    """The first id."""
    suffix: str
    """The suffix of the names of processes."""

    @property
    def workers_per_rank(self) -> int:
        """The number of workers per rank."""
        return len(self.timeline.tracks) // self.timeline.program.ranks

    @property
    def chain_id(self) -> int:
        """The id of the critical path's process and thread, the last one of the side."""
        return self.first + len(self.timeline.tracks)

    @cached_property
    def ids(self) -> Sequence[tuple[int, int]]:
        """The process and the thread of each track."""
        return [
            (self.first + track.rank * self.workers_per_rank, self.first + number)
            for number, track in enumerate(self.timeline.tracks)
        ]

    @cached_property
    def regions(self) -> _Regions:
        return _Regions(self.timeline.program)

    def names(self) -> Iterator[Event]:
        """Name the processes and threads, and put the critical path first."""
        path = f"critical path{self.suffix}"
        yield from _named("process", path, self.first - 1, self.chain_id, self.chain_id)
        yield from _named("thread", path, 0, self.chain_id, self.chain_id)
        for track, (process, thread) in zip(self.timeline.tracks, self.ids, strict=True):
            if track.worker == 0:
                name = f"rank {track.rank}{self.suffix}"
                yield from _named("process", name, process, process, thread)
            yield from _named("thread", f"worker {track.worker}", track.worker, process, thread)

    def counters(self) -> Iterator[Event]:
        """Yield the loads and the busy workers of each rank, whenever they change."""
        for rank in range(self.timeline.program.ranks):
            tracks = range(rank * self.workers_per_rank, (rank + 1) * self.workers_per_rank)
            if not tracks:
                continue
            rates = rates_of(self.timeline, tracks)
            process = self.ids[tracks[0]][0]
            for name, unit, digits, values in (
                ("loads", "bytes per µs", None, rates.bytes_per_us),
                ("workers", "busy", 3, rates.busy),
            ):
                past: float | None = None
                for place, value in enumerate([*values, 0]):
                    shown = round(value, digits) + 0  # never -0.0
                    moment = round(place * rates.piece_us * 1000)
                    if shown != past:
                        yield _event(name, "C", moment, process, process, args={unit: shown})
                        past = shown

    def chain(self) -> Iterator[Event]:
        """Yield the instructions of the critical path. If two overlap, cut off the later one."""
        free = 0
        for number in self.timeline.chain:
            start, finish = _nanoseconds(self.timeline, number)
            start = max(start, free)
            free = max(finish, start)
            instruction = self.timeline.program.instructions[number]
            args = {"instruction": number, "label": instruction.label}
            yield {
                **_event(instruction.name, "X", start, self.chain_id, self.chain_id, args=args),
                "cat": "critical path",
                "dur": (free - start) / 1000,
            }

    def slice(self, number: int) -> Event:
        start, finish = _nanoseconds(self.timeline, number)
        process, thread = self.ids[self.timeline.timing.workers[number]]
        return {
            "name": self.timeline.program.instructions[number].name,
            "cat": "instruction",
            "ph": "X",
            "ts": start / 1000,
            "dur": (finish - start) / 1000,
            "pid": process,
            "tid": thread,
            "args": _arguments(self.timeline, number, self.regions),
        }

    def arrow(self, early: int, late: int) -> Iterator[Event]:
        """Yield an arrow from the last moment in the early slice to the start of the late one."""
        start, finish = _nanoseconds(self.timeline, early)
        ends = (
            (early, "s", max(start, finish - 1)),
            (late, "f", _nanoseconds(self.timeline, late)[0]),
        )
        for number, phase, moment in ends:
            process, thread = self.ids[self.timeline.timing.workers[number]]
            event = {
                "name": "wait",
                "cat": "wait",
                "ph": phase,
                "id": late + 1,
                "ts": moment / 1000,
                "pid": process,
                "tid": thread,
            }
            if phase == "f":
                event["bp"] = "e"  # the enclosing slice, not the next one
            yield event


def _event(name: str, phase: str, moment: int, process: int, thread: int, **more: Any) -> Event:
    return {"name": name, "ph": phase, "ts": moment / 1000, "pid": process, "tid": thread, **more}


def _named(kind: str, name: str, order: int, process: int, thread: int) -> Iterator[Event]:
    """Yield the name of a process or thread, and its place among the others."""
    yield _event(f"{kind}_name", "M", 0, process, thread, args={"name": name})
    yield _event(f"{kind}_sort_index", "M", 0, process, thread, args={"sort_index": order})


def _measured_slices(side: _Side, measured: MeasuredStep, number: int) -> Iterator[Event]:
    """Yield the wait of an instruction, if there was one, and its execution."""
    timing = side.timeline.timing
    begin, ready, end = measured.begins[number], timing.starts[number], timing.finishes[number]
    event = side.slice(number)
    first = round(begin * 1000)
    if first < round(ready * 1000):
        yield {
            **event,
            "name": "wait",
            "cat": "wait",
            "ts": first / 1000,
            "dur": (round(ready * 1000) - first) / 1000,
            "args": {"instruction": number},
        }
    times = {"begin_us": begin, "wait_us": ready - begin, "end_us": end}
    rounded = {name: round(value, 3) for name, value in times.items()}
    yield {**event, "args": event["args"] | rounded}


def _arguments(timeline: Timeline, number: int, regions: _Regions) -> Event:
    program, timing = timeline.program, timeline.timing
    instruction = program.instructions[number]
    return {
        "instruction": number,
        "label": instruction.label,
        "layer": layer_of(instruction),
        "cost_us": round(timing.finishes[number] - timing.starts[number], 3),
        "reads": ", ".join(map(regions.text, instruction.reads)),
        "writes": ", ".join(map(regions.text, instruction.writes)),
        "waits": ", ".join(
            [f"counter {wait.counter} ≥ {wait.until}" for wait in program.waits[number]]
        ),
        "signals": ", ".join([f"counter {counter}" for counter in program.signals[number]]),
    }


class _Regions:
    """The texts of regions. Many instructions read the same ones."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._texts: dict[Region, str] = {}

    def text(self, region: Region) -> str:
        text = self._texts.get(region)
        if text is None:
            text = self._program.buffers[region.buffer].name + box_text(region.box)
            self._texts[region] = text
        return text


def _nanoseconds(timeline: Timeline, number: int) -> tuple[int, int]:
    """Return start and finish, rounded so that neighbours on a track meet and never overlap."""
    timing = timeline.timing
    return round(timing.starts[number] * 1000), round(timing.finishes[number] * 1000)
