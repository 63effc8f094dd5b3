"""Steps may overlap only if their counters and values are kept apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vm.programs import Touch, program_of
from tpcompile.vm.program import Box, Buffer, Program, Region, Role, Wait
from tpcompile.vm.proof.oracle import broken
from tpcompile.vm.proof.overlap import steps_may_overlap
from tpcompile.vm.proof.verify import check_program

ALL: Box = ((0, 4),)
TOKENS, BEST = (Region(0, ALL), Region(1, ALL)), (Region(2, ALL), Region(3, ALL))


def _buffers(*scratch: str) -> tuple[Buffer, ...]:
    """Return the tokens of two ranks, which persist between steps, and scratch memory."""
    tokens = (Buffer(f"t{rank}", (4,), rank=rank, role=Role.TOKENS) for rank in (0, 1))
    return *tokens, *(Buffer(name, (4,)) for name in scratch)


def two_ranks() -> Program:
    """Return a step in which each rank computes a best, and then a token from both bests."""
    buffers = _buffers("best0", "best1")
    steps = (
        *(Touch((TOKENS[r],), (BEST[r],), f"best {r}", rank=r) for r in (0, 1)),
        *(Touch(BEST, (TOKENS[r],), f"token {r}", rank=r) for r in (0, 1)),
    )
    return program_of(buffers, steps, ((0, 2), (1, 3)), ranks=2, repeats=True)


def without_step_waits(program: Program, *but: int) -> Program:
    waits = tuple(
        old if number in but else tuple(wait for wait in old if wait.until)
        for number, old in enumerate(program.waits)
    )
    return replace(program, waits=waits)


def test_a_step_waits_for_the_last_one() -> None:
    program = two_ranks()
    assert not check_program(program) and not broken(program)
    assert any(wait.until == 0 for waits in program.waits for wait in waits)


def test_a_rank_that_begins_while_another_still_reads() -> None:
    """Starting early would overwrite a best that the other rank still reads."""
    program = without_step_waits(two_ranks())
    assert broken(program)
    assert {fault.rule for fault in check_program(program)} == {"steps"}
    assert not steps_may_overlap(program)


def test_a_rank_that_begins_with_something_else() -> None:
    """Starting early with a private buffer is safe if the best is written after a step wait."""
    buffers = _buffers("best0", "best1", "own0", "own1")
    private = (Region(4, ALL), Region(5, ALL))
    steps = (
        *(Touch((TOKENS[r],), (private[r],), f"own {r}", rank=r) for r in (0, 1)),
        *(Touch((private[r],), (BEST[r],), f"best {r}", rank=r) for r in (0, 1)),
        *(Touch(BEST, (TOKENS[r],), f"token {r}", rank=r) for r in (0, 1)),
    )
    whole = program_of(buffers, steps, ((0, 2, 4), (1, 3, 5)), ranks=2, repeats=True)
    assert not check_program(whole)
    early = without_step_waits(whole)
    assert broken(early) and check_program(early)
    ends = max(counter for counters in whole.signals for counter in counters)
    later = tuple(
        (*waits, Wait(ends, 0)) if number in (2, 3) else waits
        for number, waits in enumerate(early.waits)
    )
    careful = replace(early, waits=later)
    assert not broken(careful)
    assert steps_may_overlap(careful) and not check_program(careful)


@pytest.mark.parametrize(("until", "fine"), [(0, True), (-1, False), (-2, False)])
def test_fewer_signals_of_the_step_before(until: int, fine: bool) -> None:
    program = two_ranks()
    waits = tuple(tuple(Wait(w.counter, w.until or until) for w in old) for old in program.waits)
    changed = replace(program, waits=waits)
    assert broken(changed) is not fine
    assert bool(check_program(changed)) is not fine
