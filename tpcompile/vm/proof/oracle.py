"""The adversary: holds one instruction back for as long as it can, and sees who overtakes it.

Slow and plain. It is what the verifier is judged by. Of a program that repeats it sees three steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tpcompile.vm.program import Instruction, Program, Region, overlap
from tpcompile.vm.proof.conflict import conflict, heads_of
from tpcompile.vm.proof.execution import run_order, unrolled

STEPS = 3
"""What one step does to the next, it may do only to the one behind that."""


def broken(program: Program) -> bool:
    """Whether anything can go wrong."""
    return (
        misplaced(program)
        or deadlocked(program)
        or overtaken(program) is not None
        or split_head(program) is not None
    )


def misplaced(program: Program) -> bool:
    """Whether a worker of one rank runs what works on the memory of another."""
    each = len(program.queues) // program.ranks
    return any(
        program.instructions[number].rank != place // each
        for place, queue in enumerate(program.queues)
        for number in queue
    )


def deadlocked(program: Program) -> bool:
    """Whether some instruction can never run, where each queue has but one worker."""
    steps = _steps(program)
    return len(list(run_order(steps))) < len(steps.instructions)


def overtaken(program: Program) -> tuple[int, int] | None:
    """Two instructions that conflict, of which the later can run first; None if there are none.

    In a program that repeats they are counted on from step to step.
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
    """A head that is finished before all of it is there, or never, or twice; None if there is none.

    Counts arrivals as a machine does that knows nothing of who belongs together.
    """
    steps = _steps(program)
    if not any(instruction.joins for instruction in steps.instructions):
        return None
    for held in (None, *range(len(steps.instructions))):
        found = split(steps.instructions, _order(steps, held))
        if found is not None:
            return found
    return None


@dataclass
class _Slot:
    whole: int
    arrivals: int
    finish: tuple[float, ...]
    arrived: int = 0
    rows: list[int] = field(default_factory=list)


def split(instructions: Sequence[Instruction], order: Iterator[int]) -> Region | None:
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
                return join.region  # how it ends depends on whom the machine asks
            slot.arrived += 1
            slot.rows += range(*join.part)
            if slot.arrived == slot.arrivals:
                if sorted(slot.rows) != list(range(slot.whole)):
                    return join.region
                del slots[join.region]
    return next(iter(slots), None)


def _meet(one: Region, other: Region) -> bool:
    return one.buffer == other.buffer and overlap(one.box, other.box)


def _order(program: Program, held: int | None) -> Iterator[int]:
    """With as many workers at each queue as there can be, if it has several."""
    return run_order(program, held, apart=program.sharing > 1)


def _steps(program: Program) -> Program:
    return unrolled(program, STEPS) if program.repeats else program
