"""Mutants on the reference machine: what the adversary says can go wrong is made to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import torch

from tests.backends.reference.stepping import Case, tables_of, texts
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.table import Mutant
from tpcompile.backends.reference import held_back, in_program_order, shuffled
from tpcompile.errors import VerifyError
from tpcompile.vm.groups import NormLmHead
from tpcompile.vm.program import Program, Role
from tpcompile.vm.proof.execution import unrolled
from tpcompile.vm.proof.oracle import STEPS, deadlocked

Order = Callable[[Program], Iterator[int]]

ONLY_DESCRIBED = frozenset(
    {
        "part_reused",  # its instructions are described otherwise, and run as they were
        "residual_added_to_while_it_is_read",
        "terms_added_in_any_order",  # they write where atomics would add
        "rank_changed",  # the machine has no ranks that lie apart
        "block_alone",  # two that finish one head at once: the machine runs one at a time
    }
)
"""Kinds whose instructions do not do what they are described as."""


MAY_COME_RIGHT = frozenset(
    {
        # finished too early, a head is finished again, and rows that two compute are the same
        *("rows_shifted", "arrivals_wrong", "head_in_two", "slot_shared"),
    }
)
"""Kinds of which some come out right on a machine that runs one instruction at a time."""


def spoilt(mutant: Mutant, judge: Judge) -> bool:
    """Whether it hangs, or comes to something else than it should, when it is made to.

    Where order is missing, that is what the same instructions come to in program order; where a
    head is not whole, what the right program does.
    """
    case, program = mutant.base.case, mutant.program
    if deadlocked(program):
        return _hangs(case, unrolled(program, 2) if program.repeats else program)
    pairs = list(judge.overtaken(program))
    if any(_differs(case, program, *pair) for pair in (pairs[-1:] + pairs[:2])):
        return True
    return not _same(
        _result(case, program, in_program_order),
        _result(case, mutant.base.program, in_program_order),
    )


def comes_right(mutant: Mutant, seed: int) -> bool:
    """Whether some steps in one go, in any order that the mutant allows, come to what the same
    instructions come to in program order."""
    case, steps = mutant.base.case, unrolled(mutant.program, STEPS)
    right = _result(case, steps, in_program_order)
    held = Random(seed).randrange(len(steps.instructions))
    orders = shuffled(seed), held_back(held, seed)
    return all(_same(_result(case, steps, order), right) for order in orders)


def _differs(case: Case, program: Program, held: int, later: int) -> bool:
    """Whether it matters that one is held back; steps are run in one go if a later step is
    the one that overtakes it."""
    if later >= len(program.instructions):
        program = unrolled(program, STEPS)
    if program.sharing > 1:
        program = replace(program, sharing=len(program.instructions))
    right = _result(case, program, in_program_order)
    return not _same(_result(case, program, held_back(held)), right)


def _hangs(case: Case, program: Program) -> bool:
    """Whether one worker at each queue does not come to the end."""
    try:
        _result(case, replace(program, sharing=1), shuffled(0))
    except VerifyError as error:
        return "deadlocks" in str(error)
    return False


def _result(case: Case, program: Program, order: Order) -> list[torch.Tensor]:
    """What a program leaves behind, run once: logits, tokens, and all else that is kept.

    With random weights and tied embeddings the next token is mostly the last one, and a step that
    takes the old token would not be seen: so the least likely is chosen.
    """
    machine = case.machine()
    lengths, rows = torch.tensor(case.lengths), texts(case.model, case.lengths)
    tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
    machine.place(torch.stack(tokens), lengths, tables_of(case.lengths))
    heads = [i for i in case.program.instructions if isinstance(i, NormLmHead)]
    for weight in {head.at.normed.weight for head in heads}:
        machine.memory.tensors[weight] = -machine.memory.tensors[weight]
    machine.memory.program = program
    machine.run(1, order)
    kept = (Role.HISTORY, Role.TOKENS, Role.LENGTHS, Role.CACHE)
    return [machine.logits, *(value for role in kept for value in machine.memory.values(role))]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Bit by bit; what is no number on both sides is the same."""
    return all(
        torch.equal(one.nan_to_num(nan=-9e9), other.nan_to_num(nan=-9e9))
        for one, other in zip(found, wanted, strict=True)
    )
