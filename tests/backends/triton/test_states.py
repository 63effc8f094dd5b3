"""Tests of the states of linear attention, of sequences that begin, end or are absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.backends.reference.step_models import HYBRID, HYBRID_ODD
from tests.backends.reference.stepping import Case, place, tables_of, texts
from tests.backends.triton.test_triton import EXACT
from tests.models import relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.backends.triton import Triton
from tpcompile.backends.triton.emit import emit
from tpcompile.vm.groups import DeltaStep
from tpcompile.vm.program import Buffer, Role
from tpcompile.vm.program.buffer import LINEAR_STATES

CASE = Case(HYBRID, tp=2, lengths=(9, 1), workers=2)
"""The second sequence is new, and the memory of its state is NaN."""


def _both() -> tuple[Triton, Machine]:
    return Triton(CASE.memory()), Machine(CASE.memory())


def _states(memory: StepMemory) -> list[torch.Tensor]:
    return [state for role in LINEAR_STATES for state in memory.values(role)]


def _check_states(actual: StepMemory, expected: StepMemory, rows: list[int]) -> None:
    """Raise unless these states are those of the reference machine, and others are as at first."""
    untouched = [row for row in range(2 * len(CASE.lengths)) if row not in rows]
    for state, reference, old in zip(*map(_states, (actual, expected, CASE.memory())), strict=True):
        assert relative_error(state[:, rows], reference[:, rows]) < EXACT
        assert torch.equal(state[:, untouched].nan_to_num(), old[:, untouched].nan_to_num())


def test_a_launch_reads_one_state_and_writes_another() -> None:
    """It keeps the states that it reads, and stores those of the last step."""
    kernel, machine = _both()
    for executor in (kernel, machine):
        place(executor, CASE, read=torch.tensor([0, 1]), write=torch.tensor([3, 2]))
    assert torch.equal(kernel.run(2), machine.run(2))
    assert relative_error(kernel.logits, machine.logits) < EXACT
    _check_states(kernel.memory, machine.memory, [2, 3])


def test_steps_of_a_launch_are_those_of_launches() -> None:
    together, alone = Triton(CASE.memory()), Triton(CASE.memory())
    for executor in (together, alone):
        place(executor, CASE)
    assert torch.equal(together.run(2), torch.cat([alone.run() for _ in range(2)]))
    assert torch.equal(together.logits, alone.logits)
    for state, other in zip(_states(together.memory), _states(alone.memory), strict=True):
        assert torch.equal(state.nan_to_num(), other.nan_to_num())


def test_a_sequence_that_has_ended() -> None:
    """Its states go on as on the reference machine, which computes its last token again."""
    free = Machine(CASE.memory())
    place(free, CASE)
    stop = int(free.run()[0, 1])
    kernel, machine = _both()
    for executor in (kernel, machine):
        place(executor, CASE, stops=(stop,))
    tokens = kernel.run(2)
    assert torch.equal(tokens, machine.run(2)) and tokens[1:, 1].eq(-1).all()
    _check_states(kernel.memory, machine.memory, [0, 1])


def test_a_row_without_a_sequence() -> None:
    """Its states stay as they are."""
    kernel, machine = _both()
    length = CASE.lengths[0]
    token = texts(CASE.model, CASE.lengths)[0][length - 1]
    for executor in (kernel, machine):
        executor.place(token[None], torch.tensor([length]), tables_of(CASE.lengths)[:1])
        executor.run(2)
    assert relative_error(kernel.logits[:1], machine.logits[:1]) < EXACT
    _check_states(kernel.memory, machine.memory, [0])


def test_states_may_move() -> None:
    """The kernel reads and writes those that the memory was last given."""
    kernel, machine = _both()
    place(machine, CASE)
    machine.run()
    moved = CASE.memory()
    states = [
        {role.word: state for role, state in zip(LINEAR_STATES, rank_states, strict=True)}
        for rank_states in zip(*(moved.values(role) for role in LINEAR_STATES), strict=True)
    ]
    place(kernel, CASE)
    kernel.run()
    left = _states(kernel.memory)
    kernel.memory.use_caches(kernel.memory.values(Role.CACHE), states)
    place(kernel, CASE)
    for state in left:  # they stay allocated
        state.fill_(torch.nan)
    kernel.run()
    _check_states(moved, machine.memory, [0, 1])


def test_a_worker_has_room_for_a_query_a_key_and_a_value() -> None:
    """Their widths are rounded up to powers of two: 12, 12 and 20 to 16, 16 and 32."""
    assert emit(Case(HYBRID_ODD, lengths=(1,)).program).scratch == 64


def _changed_logits(kind: type[Executor], change: Callable[[StepMemory], None]) -> torch.Tensor:
    """Return the logits of a step after a change of the memory."""
    memory = CASE.memory()
    change(memory)
    executor = kind(memory)
    place(executor, CASE)
    executor.run()
    return executor.logits.clone()


def _with_bias(memory: StepMemory) -> None:
    """Give the convolutions of all ranks a bias, which no model has."""
    program = memory.program
    steps = [step for step in program.instructions if isinstance(step, DeltaStep)]
    widths = {step.at.rank: step.at.channels for step in steps}
    first = len(program.buffers)
    buffers = [
        Buffer("conv.bias", (widths[rank],), torch.float32, rank, Role.WEIGHT)
        for rank in sorted(widths)
    ]
    memory.tensors += [torch.linspace(-1, 1, buffer.shape[0]) for buffer in buffers]
    memory.program = replace(
        program,
        buffers=(*program.buffers, *buffers),
        instructions=tuple(
            replace(instruction, at=replace(instruction.at, bias=first + instruction.at.rank))
            if isinstance(instruction, DeltaStep)
            else instruction
            for instruction in program.instructions
        ),
    )


def _with_small_rates(memory: StepMemory) -> None:
    """Let gates be so low that 1 + exp(gate) rounds to 1, and multiply them by a high rate."""
    for instruction in memory.program.instructions:
        if isinstance(instruction, DeltaStep):
            for number, value in ((instruction.at.offset, -18.0), (instruction.at.rate, 16.0)):
                memory.tensors[number] = torch.full_like(memory.tensors[number], value)


@pytest.mark.parametrize("change", [_with_bias, _with_small_rates])
def test_weights_that_no_model_has(change: Callable[[StepMemory], None]) -> None:
    actual, expected = (_changed_logits(kind, change) for kind in (Triton, Machine))
    assert relative_error(actual, expected) < EXACT
    assert relative_error(actual, _changed_logits(Triton, lambda memory: None)) > 100 * EXACT
