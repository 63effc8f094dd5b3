"""The schedule in the page says of each instruction what the program and its clock say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.vm.schedule.test_measured import times_of
from tpcompile.inspect.explorer.steps import step_data
from tpcompile.inspect.schedule import ScheduleReport
from tpcompile.inspect.timeline import Timeline
from tpcompile.scheduling import schedule
from tpcompile.vm.program import Region
from tpcompile.vm.proof.fault import Fault
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.measured import MeasuredSteps, measured_step

pytestmark = pytest.mark.usefixtures("captured_once")
POLICIES = ("critical-path", "dynamic")


@cache
def report(policy: str) -> ScheduleReport:
    """Return a schedule with instructions of two ranks, and heads that several of them finish."""
    step = schedule(
        "preset:tiny-qwen3", tp=2, target="cpu", workers=5, policy=policy, lowering="rows"
    )
    return step.report


def timing_of(policy: str) -> Timing:
    timing = report(policy).schedule.timing
    assert timing is not None
    return timing


class Page:
    """The data as the page reads them."""

    def __init__(self, reported: ScheduleReport, measured: MeasuredSteps | None = None) -> None:
        data, self.blob = step_data(reported, measured)
        self.data = json.loads(json.dumps(data))
        self.count: int = self.data["instructions"]

    def __getitem__(self, name: str) -> list[int]:
        dtype, offset, count = self.data["index"][name]
        assert offset % 8 == 0
        return np.frombuffer(self.blob, np.dtype(dtype).newbyteorder("<"), count, offset).tolist()

    def cut(self, lengths: Sequence[int], elements: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the elements of each instruction."""
        remaining = iter(elements)
        pieces = [tuple(next(remaining) for _ in range(length)) for length in lengths]
        assert next(remaining, None) is None
        return pieces

    def labels(self) -> list[str]:
        """Return the labels, put together from kinds, groups and operands."""
        met = [0] * len(self.data["kinds"])
        columns = {name: self[name] for name in self.data["index"] if name.startswith("own_")}
        of = {name: self[f"group_{name}"] for name in ("kind", "layer", "rank", "words")}
        labels = []
        for group in self["group"]:
            number, layer = of["kind"][group], of["layer"][group]
            place, kind = met[number], self.data["kinds"][number]
            met[number] += 1
            words = [kind["name"], self.data["words"][of["words"][group]]]
            words += [f"layer {layer}"] if layer >= 0 else []
            words.append(f"rank {of['rank'][group]}")
            for field in kind["fields"]:
                column = columns[f"own_{number}_{field['name']}"]
                pair = column[2 * place : 2 * place + 2]
                value = f"{pair[0]}:{pair[1]}" if field["range"] else column[place]
                words.append(f"{field['name']}={value}")
            labels.append(" ".join(filter(None, words)))
        return labels

    def regions(self) -> list[tuple[Region, ...]]:
        edges = self.cut([2 * dims for dims in self["box_dims"]], self["box_edges"])
        boxes = [tuple(zip(bounds[::2], bounds[1::2], strict=True)) for bounds in edges]
        assert len(set(boxes)) == len(boxes)
        pairs = zip(self["access_buffer"], self["access_box"], strict=True)
        lengths = map(sum, zip(self["reads"], self["writes"], self["joins"], strict=True))
        return self.cut(list(lengths), [Region(buffer, boxes[box]) for buffer, box in pairs])


@cache
def page(policy: str) -> Page:
    return Page(report(policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_instructions(policy: str) -> None:
    """Labels and regions are those of the program."""
    program, shown = report(policy).schedule.program, page(policy)
    assert shown.labels() == [instruction.label for instruction in program.instructions]
    assert shown.regions() == [
        (*instruction.reads, *instruction.writes, *(join.region for join in instruction.joins))
        for instruction in program.instructions
    ]
    for how in ("reads", "writes", "joins"):
        assert shown[how] == [
            len(getattr(instruction, how)) for instruction in program.instructions
        ]
    assert any(shown["joins"]), "some instructions finish a head together"
    assert [kind["name"] for kind in shown.data["kinds"]] == list(
        dict.fromkeys(instruction.name for instruction in program.instructions)
    )


def test_buffers() -> None:
    shown = page(POLICIES[0])
    names = [
        (shown.data["buffers"][like], rank)
        for like, rank in zip(shown["buffer_like"], shown["buffer_rank"], strict=True)
    ]
    for (like, rank), buffer in zip(
        names, report(POLICIES[0]).schedule.program.buffers, strict=True
    ):
        assert (like["name"], like["role"], rank) == (buffer.name, buffer.role.word, buffer.rank)
        assert tuple(like["shape"]) == buffer.shape
        assert f"torch.{like['dtype']}" == str(buffer.dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order(policy: str) -> None:
    """Waits, signals, the last of the waits and the critical path are those of the program."""
    program, timing, shown = report(policy).schedule.program, timing_of(policy), page(policy)
    waits = list(zip(shown["wait_counter"], shown["wait_until"], strict=True))
    assert shown.cut(shown["waits"], waits) == list(program.waits)
    assert shown.cut(shown["signals"], shown["signal_counter"]) == list(program.signals)
    timeline = Timeline(program, timing)
    assert shown["released_by"] == [-1 if n is None else n for n in timeline.released_by]
    assert shown["chain"] == list(timeline.chain)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clock(policy: str) -> None:
    """Times are rounded to ns, and the parts of an instruction's time do not exceed it."""
    scheduled, timing, shown = report(policy).schedule, timing_of(policy), page(policy)
    assert shown["start"] == [round(us * 1000) for us in timing.starts]
    assert shown["finish"] == [round(us * 1000) for us in timing.finishes]
    assert shown["worker"] == list(timing.workers)
    assert shown.data["workers"] == len(timing.idle) == 10
    rows = zip(shown["parts"], scheduled.parts, shown["start"], shown["finish"], strict=True)
    for number, parts, start, finish in rows:
        fixed, traffic, work = shown.data["parts"][number]
        assert (fixed, work) == (round(parts.fixed_us * 1000), round(parts.work_us * 1000))
        assert traffic == parts.traffic
        assert fixed + work <= finish - start + 2


def test_figures() -> None:
    reported, data = report(POLICIES[0]), page(POLICIES[0]).data
    assert data["asked"] == reported.choices
    assert (data["verified"], data["faults"], data["measured"]) == (True, [], [])
    assert data["makespan_us"] == timing_of(POLICIES[0]).makespan
    assert data["target"] == dataclasses.asdict(reported.schedule.target)
    loads: dict[int, int] = {}
    for instruction in reported.schedule.program.instructions:
        loads[instruction.rank] = loads.get(instruction.rank, 0) + getattr(
            instruction, "traffic", 0
        )
    assert data["bandwidth"]["loaded_bytes"] == max(loads.values())


def test_a_scheduled_program_without_a_report() -> None:
    data, blob = step_data(report(POLICIES[0]).schedule)
    assert json.loads(json.dumps(data)) == {**page(POLICIES[0]).data, "asked": {}}
    assert blob == page(POLICIES[0]).blob


@pytest.mark.parametrize("policy", POLICIES)
def test_measured_steps(policy: str) -> None:
    reported, timing = report(policy), timing_of(policy)
    step = measured_step(reported.schedule.program, times_of(timing))
    later = dataclasses.replace(step, begins=tuple(0.0 for _ in step.begins))
    shown = Page(reported, MeasuredSteps(reported.schedule.program, [step, later]))
    assert shown.data["measured"] == [{"us": step.step_us}] * 2
    for number, measured in enumerate((step, later)):
        begins, waits, runs, workers = (
            shown[f"measured_{number}_{name}"] for name in ("begin", "wait", "run", "worker")
        )
        assert begins == [round(us * 1000) for us in measured.begins]
        starts = [a + b for a, b in zip(begins, waits, strict=True)]
        assert starts == [round(us * 1000) for us in measured.timing.starts]
        finishes = [a + b for a, b in zip(starts, runs, strict=True)]
        assert finishes == [round(us * 1000) for us in measured.timing.finishes]
        assert workers == list(measured.timing.workers)


def test_steps_of_seconds_stay_exact() -> None:
    """A step of more than two seconds does not fit into int32 ns."""
    reported, timing = report(POLICIES[0]), timing_of(POLICIES[0])
    slow = Timing(
        tuple(us + 3e6 for us in timing.starts),
        tuple(us + 3e6 for us in timing.finishes),
        timing.idle,
        timing.workers,
    )
    shown = Page(
        dataclasses.replace(reported, schedule=dataclasses.replace(reported.schedule, timing=slow)),
    )
    assert shown["finish"] == [round(us * 1000) for us in slow.finishes]
    assert {shown.data["index"][name][0] for name in ("start", "finish")} == {"float64"}


def test_a_program_with_faults_has_only_its_faults() -> None:
    faults = (Fault("order", "a <b> can come before c", 3), Fault("deadlock", "never"))
    reported = report(POLICIES[0])
    refused = dataclasses.replace(reported.schedule, faults=faults, timing=None)
    data, blob = step_data(dataclasses.replace(reported, schedule=refused))
    assert (data["index"], blob) == ({}, b"")
    assert (data["verified"], data["makespan_us"], data["fault_count"]) == (False, None, 4)
    assert data["faults"][0] == {"rule": "order", "said": "a <b> can come before c"}
    json.dumps(data)
