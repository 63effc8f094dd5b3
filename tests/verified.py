"""Programs that are verified once, for tests whose subject is not verification.

A program cannot change, so a second check of the same object has the same result. Executors check
each program that they are given; a test that gives one program to several would repeat it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpcompile.vm.program import Program

_MOST_KEPT = 64
"""The maximum number of programs that are kept so that their identity stays theirs."""


def share_verdicts(patch: pytest.MonkeyPatch) -> None:
    """Let memories and executors check a program only if they have not accepted it before."""
    from tpcompile.backends import memory
    from tpcompile.backends.native import executor as native
    from tpcompile.backends.triton import executor as triton

    verify = _once(native.verify_program)
    patch.setattr(native, "verify_program", verify)
    patch.setattr(triton, "verify_program", verify)
    patch.setattr(memory, "verify_operands", _once(memory.verify_operands))


def _once(check: Callable[[Program], None]) -> Callable[[Program], None]:
    accepted: dict[int, Program] = {}

    def checked(program: Program) -> None:
        if accepted.get(id(program)) is program:
            return
        check(program)
        accepted[id(program)] = program
        if len(accepted) > _MOST_KEPT:
            del accepted[next(iter(accepted))]

    return checked
