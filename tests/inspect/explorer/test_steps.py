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
    """A schedule with instructions of two ranks, and with heads that several of them finish."""
    step = schedule(
        "preset:tiny-qwen3", tp=2, target="cpu", workers=5, policy=policy, lowering="rows"
    )
    return step.report


def timing_of(policy: str) -> Timing:
    found = report(policy).found.timing
    assert found is not None
    return found


class Page:
    """The data as the page reads them."""

    def __init__(self, found: ScheduleReport, measured: MeasuredSteps | None = None) -> None:
        data, self.blob = step_data(found, measured)
        self.data = json.loads(json.dumps(data))
        self.count: int = self.data["instructions"]

    def __getitem__(self, name: str) -> list[int]:
        dtype, offset, count = self.data["index"][name]
        assert offset % 8 == 0
        return np.frombuffer(self.blob, np.dtype(dtype).newbyteorder("<"), count, offset).tolist()

    def cut(self, lengths: Sequence[int], elements: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the elements of each instruction."""
        rest = iter(elements)
        found = [tuple(next(rest) for _ in range(length)) for length in lengths]
        assert next(rest, None) is None
        return found

    def labels(self) -> list[str]:
        """Return the labels, put together from kinds, groups and operands."""
        met = [0] * len(self.data["kinds"])
        own = {name: self[name] for name in self.data["index"] if name.startswith("own_")}
        of = {name: self[f"group_{name}"] for name in ("kind", "layer", "rank", "words")}
        found = []
        for group in self["group"]:
            number, layer = of["kind"][group], of["layer"][group]
            place, kind = met[number], self.data["kinds"][number]
            met[number] += 1
            words = [kind["name"], self.data["words"][of["words"][group]]]
            words += [f"layer {layer}"] if layer >= 0 else []
            words.append(f"rank {of['rank'][group]}")
            for field in kind["fields"]:
                column = own[f"own_{number}_{field['name']}"]
                pair = column[2 * place : 2 * place + 2]
                value = f"{pair[0]}:{pair[1]}" if field["range"] else column[place]
                words.append(f"{field['name']}={value}")
            found.append(" ".join(filter(None, words)))
        return found

    def regions(self) -> list[tuple[Region, ...]]:
        edges = self.cut([2 * dims for dims in self["box_dims"]], self["box_edges"])
        boxes = [tuple(zip(own[::2], own[1::2], strict=True)) for own in edges]
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
    program, found = report(policy).found.program, page(policy)
    assert found.labels() == [one.label for one in program.instructions]
    assert found.regions() == [
        (*one.reads, *one.writes, *(join.region for join in one.joins))
        for one in program.instructions
    ]
    for how in ("reads", "writes", "joins"):
        assert found[how] == [len(getattr(one, how)) for one in program.instructions]
    assert any(found["joins"]), "some instructions finish a head together"
    assert [kind["name"] for kind in found.data["kinds"]] == list(
        dict.fromkeys(one.name for one in program.instructions)
    )


def test_buffers() -> None:
    found = page(POLICIES[0])
    names = [
        (found.data["buffers"][like], rank)
        for like, rank in zip(found["buffer_like"], found["buffer_rank"], strict=True)
    ]
    for (like, rank), buffer in zip(names, report(POLICIES[0]).found.program.buffers, strict=True):
        assert (like["name"], like["role"], rank) == (buffer.name, buffer.role.word, buffer.rank)
        assert tuple(like["shape"]) == buffer.shape
        assert f"torch.{like['dtype']}" == str(buffer.dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order(policy: str) -> None:
    """Waits, signals, the last of the waits and the critical path are those of the program."""
    program, timing, found = report(policy).found.program, timing_of(policy), page(policy)
    waits = list(zip(found["wait_counter"], found["wait_until"], strict=True))
    assert found.cut(found["waits"], waits) == list(program.waits)
    assert found.cut(found["signals"], found["signal_counter"]) == list(program.signals)
    timeline = Timeline(program, timing)
    assert found["released_by"] == [-1 if n is None else n for n in timeline.released_by]
    assert found["chain"] == list(timeline.chain)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clock(policy: str) -> None:
    """Times are rounded to ns, and the parts of an instruction's time do not exceed it."""
    made, timing, found = report(policy).found, timing_of(policy), page(policy)
    assert found["start"] == [round(us * 1000) for us in timing.starts]
    assert found["finish"] == [round(us * 1000) for us in timing.finishes]
    assert found["worker"] == list(timing.workers)
    assert found.data["workers"] == len(timing.idle) == 10
    each = zip(found["parts"], made.parts, found["start"], found["finish"], strict=True)
    for number, own, start, finish in each:
        fixed, traffic, work = found.data["parts"][number]
        assert (fixed, work) == (round(own.fixed_us * 1000), round(own.work_us * 1000))
        assert traffic == own.traffic
        assert fixed + work <= finish - start + 2


def test_figures() -> None:
    made, data = report(POLICIES[0]), page(POLICIES[0]).data
    assert data["asked"] == made.asked
    assert (data["verified"], data["faults"], data["measured"]) == (True, [], [])
    assert data["makespan_us"] == timing_of(POLICIES[0]).makespan
    assert data["target"] == dataclasses.asdict(made.found.target)
    loads: dict[int, int] = {}
    for one in made.found.program.instructions:
        loads[one.rank] = loads.get(one.rank, 0) + getattr(one, "traffic", 0)
    assert data["bandwidth"]["loaded_bytes"] == max(loads.values())


def test_a_scheduled_program_without_a_report() -> None:
    data, blob = step_data(report(POLICIES[0]).found)
    assert json.loads(json.dumps(data)) == {**page(POLICIES[0]).data, "asked": {}}
    assert blob == page(POLICIES[0]).blob


@pytest.mark.parametrize("policy", POLICIES)
def test_measured_steps(policy: str) -> None:
    made, timing = report(policy), timing_of(policy)
    step = measured_step(made.found.program, times_of(timing))
    later = dataclasses.replace(step, begins=tuple(0.0 for _ in step.begins))
    found = Page(made, MeasuredSteps(made.found.program, [step, later]))
    assert found.data["measured"] == [{"us": step.step_us}] * 2
    for number, own in enumerate((step, later)):
        begins, waits, runs, workers = (
            found[f"measured_{number}_{name}"] for name in ("begin", "wait", "run", "worker")
        )
        assert begins == [round(us * 1000) for us in own.begins]
        starts = [a + b for a, b in zip(begins, waits, strict=True)]
        assert starts == [round(us * 1000) for us in own.timing.starts]
        finishes = [a + b for a, b in zip(starts, runs, strict=True)]
        assert finishes == [round(us * 1000) for us in own.timing.finishes]
        assert workers == list(own.timing.workers)


def test_steps_of_seconds_stay_exact() -> None:
    """A step of more than two seconds does not fit into int32 ns."""
    made, timing = report(POLICIES[0]), timing_of(POLICIES[0])
    slow = Timing(
        tuple(us + 3e6 for us in timing.starts),
        tuple(us + 3e6 for us in timing.finishes),
        timing.idle,
        timing.workers,
    )
    found = Page(
        dataclasses.replace(made, found=dataclasses.replace(made.found, timing=slow)),
    )
    assert found["finish"] == [round(us * 1000) for us in slow.finishes]
    assert {found.data["index"][name][0] for name in ("start", "finish")} == {"float64"}


def test_a_program_with_faults_has_only_its_faults() -> None:
    faults = (Fault("order", "a <b> can come before c", 3), Fault("deadlock", "never"))
    made = report(POLICIES[0])
    refused = dataclasses.replace(made.found, faults=faults, timing=None)
    data, blob = step_data(dataclasses.replace(made, found=refused))
    assert (data["index"], blob) == ({}, b"")
    assert (data["verified"], data["makespan_us"], data["fault_count"]) == (False, None, 4)
    assert data["faults"][0] == {"rule": "order", "said": "a <b> can come before c"}
    json.dumps(data)
