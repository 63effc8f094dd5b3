"""The adversary: holds one instruction back for as long as it can, and sees who overtakes it.

Slow and plain. It is what the verifier is judged by.
"""

from __future__ import annotations

from tpcompile.vm.execution import run_all
from tpcompile.vm.program import Program, conflict


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
