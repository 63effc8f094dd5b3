"""An adversary that delays one instruction as long as possible, and finds others that overtake it.

It is slow and simple; the verifier is tested against it. It executes three steps of a program that
repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from tpcompile.vm.program import Instruction, Program, Region, overlap
from tpcompile.vm.program.program import joined
from tpcompile.vm.proof.conflict import conflict, heads_of
from tpcompile.vm.proof.execution import run_order, unrolled

STEPS = 3
"""The number of steps to execute. Two are too few: a fault may appear only between a step and the
second step after it."""


def broken(program: Program) -> bool:
    """Return whether the program has any fault."""
    return (
        misplaced(program)
        or deadlocked(program)
        or overtaken(program) is not None
        or split_head(program) is not None
        or any(True for _ in undefined(program))
    )


def misplaced(program: Program) -> bool:
    """Return whether a worker of one rank runs an instruction on the memory of another rank."""
    queues_per_rank = len(program.queues) // program.ranks
    return any(
        program.instructions[number].rank != place // queues_per_rank
        for place, queue in enumerate(program.queues)
        for number in queue
    )


def deadlocked(program: Program) -> bool:
    """Return whether some instruction can never run when each queue has only one worker."""
    steps = _steps(program)
    return len(list(run_order(steps))) < len(steps.instructions)


def overtaken(program: Program) -> tuple[int, int] | None:
    """Return two conflicting instructions of which the later can run first, or None.

    In a program that repeats, their numbers continue from step to step.
    """
    steps = _steps(program)
    heads = heads_of(steps.instructions)
    for held in range(len(steps.instructions)):
        before = takewhile(held.__ne__, _order(steps, held))
        for later in sorted(number for number in before if number > held):
            if conflict(steps, heads, held, later) is not None:
                return held, later
    return None


def split_head(program: Program) -> Region | None:
    """Return a head that is finished too early, twice or never, or None.

    Arrivals are counted as on a machine, which does not know which blocks belong together.
    """
    steps = _steps(program)
    if not any(instruction.joins for instruction in steps.instructions):
        return None
    for held in (None, *range(len(steps.instructions))):
        head = split(steps.instructions, _order(steps, held))
        if head is not None:
            return head
    return None


def undefined(program: Program) -> Iterator[tuple[int, Region]]:
    """Yield reads of scratch memory with an element that no earlier instruction has written.

    It runs the instructions of one step in program order. In any other order that lets a read
    overtake a write, the reader overtakes a conflicting instruction.
    """
    written = {
        number: torch.zeros(buffer.shape, dtype=torch.bool)
        for number, buffer in enumerate(program.buffers)
        if buffer.role.kind == "scratch"
    }
    for number, instruction in enumerate(program.instructions):
        for region in dict.fromkeys(instruction.reads):
            mask = written.get(region.buffer)
            if mask is not None and not mask[_slices(region)].all():
                yield number, region
        for region in (*instruction.writes, *joined(instruction)):
            if region.buffer in written:
                written[region.buffer][_slices(region)] = True


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in region.box)


@dataclass
class _Slot:
    whole: int
    arrivals: int
    finish: tuple[float, ...]
    arrived: int = 0
    rows: list[int] = field(default_factory=list)


def split(instructions: Sequence[Instruction], order: Iterator[int]) -> Region | None:
    """Return a head that is finished too early, twice or never in this order, or None."""
    slots: dict[Region, _Slot] = {}
    for number in order:
        touched = [*instructions[number].reads, *instructions[number].writes]
        joins = instructions[number].joins
        for region in touched + [join.region for join in joins]:
            for other in slots:
                if (region != other or region in touched) and _meet(region, other):
                    return other
        for join in joins:
            slot = slots.setdefault(join.region, _Slot(join.whole, join.arrivals, join.finish))
            if (slot.whole, slot.arrivals, slot.finish) != (join.whole, join.arrivals, join.finish):
                return join.region  # the result depends on which block's operands are used
            slot.arrived += 1
            slot.rows += range(*join.part)
            if slot.arrived == slot.arrivals:
                if sorted(slot.rows) != list(range(slot.whole)):
                    return join.region
                del slots[join.region]
    return next(iter(slots), None)


def _meet(region: Region, other: Region) -> bool:
    return region.buffer == other.buffer and overlap(region.box, other.box)


def _order(program: Program, held: int | None) -> Iterator[int]:
    """Return the run order; if workers share queues, each instruction has its own worker."""
    return run_order(program, held, apart=program.sharing > 1)


def _steps(program: Program) -> Program:
    return unrolled(program, STEPS) if program.repeats else program
