"""Reads of scratch memory that nothing has written yet. The schedules know of the mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.vm.mutants.bases import Base, described, missing
from tests.vm.mutants.orders import Made
from tests.vm.mutations import changed
from tests.vm.programs import meet
from tpcompile.vm.program import Instruction, Region


def instruction_left_out(base: Base, dice: Random) -> Made:
    """Drop an instruction, whose readers then read what was in memory before."""
    number = dice.randrange(len(base.steps))
    steps = changed(base.steps, number, missing(base.steps[number]))
    return _scheduled(base, steps, f"{base.steps[number].label} is missing")


def written_too_late(base: Base, dice: Random) -> Made:
    """Move an instruction behind the first one that reads its result."""
    number = dice.randrange(len(base.steps))
    writer, steps = base.steps[number], list(base.steps)
    readers = (
        later
        for later in range(number + 1, len(steps))
        if any(meet(region, other) for region in steps[later].reads for other in writer.writes)
    )
    reader = next(readers, None)
    if reader is None:
        return None
    steps.insert(reader, steps.pop(number))
    return _scheduled(base, steps, f"{writer.label} comes after {steps[reader - 1].label}")


def own_result_read(base: Base, dice: Random) -> Made:
    """Let an instruction read from the buffer that it writes, in the place of another one."""
    buffers = base.program.buffers
    places = [
        (number, read.buffer, wrote.buffer)
        for number, step in enumerate(base.steps)
        for read in step.reads
        for wrote in step.writes
        if read.buffer != wrote.buffer
        and buffers[read.buffer].role.kind == "scratch"
        and replace(buffers[read.buffer], name="") == replace(buffers[wrote.buffer], name="")
    ]
    number, old, new = dice.choice(places)
    step = base.steps[number]
    reads = tuple(Region(new if r.buffer == old else r.buffer, r.box) for r in step.reads)
    wrong = replace(described(step), reads=reads, moved=((old, new),))
    description = f"{step.label} reads {buffers[new].name}, not {buffers[old].name}"
    return _scheduled(base, changed(base.steps, number, wrong), description)


def _scheduled(base: Base, steps: Sequence[Instruction], description: str) -> Made:
    return description, replace(base.scheduled_as(steps), instructions=tuple(steps))


DEFINED = (instruction_left_out, written_too_late, own_result_read)
