"""Tests that programs with mistakes go wrong in the Triton kernel too.

The mutants are those that the verifier refuses and that go wrong on the reference machine. The
kernel runs them with the same adversary: one instruction is held back as long as others can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import pytest
import torch

from tests.backends.triton.test_triton import EXACT
from tests.vm.mutants.bases import Base
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.running import ONLY_DESCRIBED, result_of, spoilt
from tests.vm.mutants.table import KINDS, Mutant, all_bases, mutants_of
from tpcompile.backends.reference import held_back, in_program_order
from tpcompile.backends.triton import Triton
from tpcompile.errors import RankError
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.proof.execution import unrolled
from tpcompile.vm.proof.oracle import STEPS, deadlocked
from tpcompile.vm.proof.verify import check_program

_NONE_TO_RUN = (
    *("counter_split", "buffer_reused_openly"),  # safe
    "workers_added",  # more workers of a shared queue: the adversary has one per queue
    *("buffer_reused", "block_dropped", "slot_shared", "head_in_two"),  # no words describe them
)
KINDS_RUN = [kind for kind in KINDS if kind not in ONLY_DESCRIBED and kind not in _NONE_TO_RUN]
_MOST_PAIRS = 40
_Unverified = partial(Triton, verify=False)


@cache
def _bases() -> list[Base]:
    """Return the programs that mutants are derived from, for 8 workers per rank."""
    return [replace(base, case=replace(base.case, workers=8)) for base in all_bases()]


def _wrong_mutants(kind: str, judge: Judge) -> Iterator[Mutant]:
    """Yield mutants that the verifier refuses and that go wrong on the reference machine."""
    for mutant in mutants_of(kind, 40, 3, _bases()):
        program = mutant.program
        words = all(
            type(instruction) in INSTRUCTIONS.values() for instruction in program.instructions
        )
        runs = words and program.sharing == 1
        if runs and judge.broken(program) and check_program(program) and spoilt(mutant, judge):
            yield mutant


def _goes_wrong(mutant: Mutant, judge: Judge) -> bool:
    """Return whether the kernel gives another result than the program in order, or deadlocks."""
    program = mutant.program
    if deadlocked(program):
        steps = unrolled(program, 2) if program.repeats else program
        with pytest.raises(RankError, match="deadlocked"):
            result_of(mutant.base.case, steps, None, _Unverified)
        return True
    pairs = list(judge.overtaken(program))
    if any(_differs(mutant, program, *pair) for pair in (*pairs[-1:], *pairs[:_MOST_PAIRS])):
        return True
    actual = result_of(mutant.base.case, program, None, _Unverified)
    return not _near(actual, result_of(mutant.base.case, mutant.base.program, in_program_order))


def _differs(mutant: Mutant, program: Program, held: int, later: int) -> bool:
    if later >= len(program.instructions):
        program = unrolled(program, STEPS)
    actual = result_of(mutant.base.case, program, held_back(held), _Unverified)
    return not _near(actual, result_of(mutant.base.case, program, in_program_order))


def _near(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether results agree up to the order of sums; NaN equals NaN."""
    return all(
        torch.allclose(tensor.float(), other.float(), EXACT, 10 * EXACT, equal_nan=True)
        for tensor, other in zip(actual, expected, strict=True)
    )


def _all_wrong(kinds: list[str], per_kind: int) -> None:
    judge, count = Judge(), 0
    for kind in kinds:
        for mutant in islice(_wrong_mutants(kind, judge), per_kind):
            count += 1
            assert _goes_wrong(mutant, judge), str(mutant)
    assert count


@pytest.mark.parametrize("kind", ["wait_dropped", "signal_dropped"])
def test_a_mutant_goes_wrong(kind: str) -> None:
    _all_wrong([kind], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_RUN)
def test_and_so_do_two_hundred(kind: str) -> None:
    _all_wrong([kind], 1 + 200 // len(KINDS_RUN))
