"""The adversary: holds one instruction back for as long as it can, and sees who overtakes it.

Slow and plain. It is what the verifier is judged by.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tpcompile.vm.execution import run_all
from tpcompile.vm.program import Program
from tpcompile.vm.region import Region, overlap


def overtaken(program: Program) -> tuple[int, int] | None:
    """Two conflicting instructions of which the later can run first; None if there are none."""
    for held in range(len(program.instructions)):
        ran: set[int] = set()
        run_all(program, ran.add, without=held)
        for later in sorted(ran):
            if later > held and conflict(program, held, later) is not None:
                return held, later
    return None


def deadlocked(program: Program) -> bool:
    """Whether some instruction can never run."""
    return bool(run_all(program))


def conflict(program: Program, one: int, other: int) -> tuple[Region, Region] | None:
    """What both touch and at least one of them writes."""
    first, second = program.instructions[one], program.instructions[other]
    pairs: Iterator[tuple[Region, Region]] = (
        pair
        for groups in (
            (first.writes, second.reads),
            (first.reads, second.writes),
            (first.writes, second.writes),
        )
        for pair in product(*groups)
    )
    return next(
        (p for p in pairs if p[0].buffer == p[1].buffer and overlap(p[0].box, p[1].box)), None
    )
