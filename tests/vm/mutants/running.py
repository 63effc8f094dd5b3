"""Run mutants on the reference machine, to show that the oracle's faults are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import torch

from tests.backends.reference.stepping import Case, tables_of, texts
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.table import Mutant
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine, held_back, in_program_order, shuffled
from tpcompile.errors import VerifyError
from tpcompile.vm.groups import NormLmHead
from tpcompile.vm.program import Program, Role
from tpcompile.vm.proof.execution import unrolled
from tpcompile.vm.proof.oracle import STEPS, deadlocked

Order = Callable[[Program], Iterator[int]]

ONLY_DESCRIBED = frozenset(
    {
        "part_reused",  # instructions are only described differently
        "residual_added_to_while_it_is_read",
        "terms_added_in_any_order",  # they write where atomics would add
        "rank_changed",  # the machine has no separate ranks
        "block_alone",  # needs two blocks that finish at once, but the machine runs one at a time
    }
)
"""Kinds whose instructions do not behave as described."""


MAY_COME_RIGHT = frozenset(
    {
        # completed too early, a head is completed again; rows computed twice are equal
        *("rows_shifted", "arrivals_wrong", "head_in_two", "slot_shared"),
    }
)
"""Kinds of which some give correct results on a machine that runs one instruction at a time."""

# an embed that reads the last token too early gives zeros if neither token is in its rank's rows
FEW_COME_RIGHT = MAY_COME_RIGHT | {"step_wait_dropped"}
"""The same, with the kinds of which few do."""


def spoilt(mutant: Mutant, judge: Judge) -> bool:
    """Return whether the mutant hangs or gives a wrong result in an adversarial order.

    The reference is the same instructions in program order, or the correct program for split heads.
    """
    case, program = mutant.base.case, mutant.program
    if deadlocked(program):
        return _hangs(case, unrolled(program, 2) if program.repeats else program)
    pairs = list(judge.overtaken(program))
    if any(_differs(case, program, *pair) for pair in (pairs[-1:] + pairs[:2])):
        return True
    return not _same(
        result_of(case, program, in_program_order),
        result_of(case, mutant.base.program, in_program_order),
    )


def comes_right(mutant: Mutant, seed: int) -> bool:
    """Return whether several steps give the result of program order, in other legal orders."""
    case, steps = mutant.base.case, unrolled(mutant.program, STEPS)
    right = result_of(case, steps, in_program_order)
    held = Random(seed).randrange(len(steps.instructions))
    orders = shuffled(seed), held_back(held, seed)
    return all(_same(result_of(case, steps, order), right) for order in orders)


def _differs(case: Case, program: Program, held: int, later: int) -> bool:
    """Return whether delaying `held` changes the result; across steps, several are run at once."""
    if later >= len(program.instructions):
        program = unrolled(program, STEPS)
    if program.sharing > 1:
        program = replace(program, sharing=len(program.instructions))
    right = result_of(case, program, in_program_order)
    return not _same(result_of(case, program, held_back(held)), right)


def _hangs(case: Case, program: Program) -> bool:
    """Return whether the program deadlocks with one worker per queue."""
    try:
        result_of(case, replace(program, sharing=1), shuffled(0))
    except VerifyError as error:
        return "deadlocks" in str(error)
    return False


def _on_the_machine(memory: StepMemory) -> Executor:
    return Machine(memory)


def result_of(
    case: Case,
    program: Program,
    order: Order | None,
    make: Callable[[StepMemory], Executor] = _on_the_machine,
) -> list[torch.Tensor]:
    """Run a program once and return its logits, tokens and persistent state.

    With random weights and tied embeddings the next token is usually the last one, so a step that
    reads the old token would go unnoticed. The least likely token is chosen instead.
    """
    memory = case.memory()
    heads = [i for i in case.program.instructions if isinstance(i, NormLmHead)]
    for weight in {head.at.normed.weight for head in heads}:
        memory.tensors[weight] = -memory.tensors[weight][:]
    memory.program = program
    executor = make(memory)
    lengths, rows = torch.tensor(case.lengths), texts(case.model, case.lengths)
    tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
    executor.place(torch.stack(tokens), lengths, tables_of(case.lengths))
    executor.memory.forget()
    executor.run(1, order)
    roles = (Role.HISTORY, Role.TOKENS, Role.LENGTHS, Role.CACHE)
    return [executor.logits, *(value for role in roles for value in memory.values(role))]


def _same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Return whether results are bitwise equal; NaN equals NaN."""
    return all(
        torch.equal(tensor.nan_to_num(nan=-9e9), other.nan_to_num(nan=-9e9))
        for tensor, other in zip(actual, wanted, strict=True)
    )
