"""Tests of mixtures of experts: what is chosen, what the chosen experts add, and in every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backends.programs import memory_of
from tests.backends.reference.step_models import (
    EIGHT_OF_MANY,
    EXPERTS,
    HYBRID_EXPERTS,
    ONE_OF_TWO,
    SHARED,
)
from tests.backends.triton.test_batches import there_and_back
from tests.backends.triton.test_triton import EXACT
from tests.backends.triton.test_weights import tokens_of
from tests.models import relative_error
from tpcompile.backends.executor import Executor
from tpcompile.backends.reference import Machine
from tpcompile.backends.triton import Triton
from tpcompile.backends.triton.branches import branch_of
from tpcompile.errors import UnsupportedError
from tpcompile.vm.groups.experts import ExpertTerms, MixtureInstruction, NormExperts
from tpcompile.vm.groups.router import TopExperts
from tpcompile.vm.program import Role
from tpcompile.vm.program.encoding import first_weights
from tpcompile.vm.program.instruction import NONE, WeightInstruction

pytestmark = pytest.mark.usefixtures("verified_once")

F32, BF16 = torch.float32, torch.bfloat16


def _executor(kind: type[Executor], model: str, batch: int, **options: Any) -> Executor:
    """Return an executor whose routers choose other experts for other tokens.

    The scratch memory of its workers is NaN.
    """
    options = {"dtype": F32, "tp": 1, **options}
    memory = memory_of(model, batch=batch, **options)
    generator = torch.Generator()
    for number, buffer in enumerate(memory.program.buffers):
        if buffer.role == Role.WEIGHT and buffer.name.endswith("mlp.gate.weight"):
            drawn = torch.randn(buffer.shape, generator=generator.manual_seed(3))
            memory.tensors[number] = drawn.to(buffer.dtype)
    executor = kind(memory)
    if isinstance(executor, Triton):
        executor._scratch.fill_(torch.nan)
    return executor


def _place(executor: Executor, tokens: torch.Tensor, **options: Any) -> None:
    """Place sequences of one token each."""
    batch = len(tokens)
    lengths, tables = torch.ones(batch, dtype=torch.long), torch.arange(batch)[:, None]
    executor.place(tokens, lengths, tables, **options)


def _logits(
    kind: type[Executor], model: str, tokens: torch.Tensor, steps: int = 1, **options: Any
) -> torch.Tensor:
    """Return the logits of sequences of one token each after some steps, in fp32."""
    executor = _executor(kind, model, len(tokens), **options)
    _place(executor, tokens)
    executor.run(steps)
    return executor.logits.float().clone()


_SLOW = [pytest.mark.slow]
_MODELS = (
    (ONE_OF_TWO, 1, 1, "tp", "int8:row"),
    (ONE_OF_TWO, 8, 2, "ep", None),
    (EIGHT_OF_MANY, 1, 1, "tp", None),
    (EIGHT_OF_MANY, 8, 2, "tp", None),
    (ONE_OF_TWO, 2, 2, "ep", "int4:32"),
    (HYBRID_EXPERTS, 2, 2, "ep", None),
    pytest.param(EIGHT_OF_MANY, 2, 2, "ep", "int4:32", marks=_SLOW),
    pytest.param(EXPERTS, 8, 1, "tp", "fp8:32", marks=_SLOW),
    pytest.param(HYBRID_EXPERTS, 3, 1, "tp", "int8:32", marks=_SLOW),
)


@pytest.mark.parametrize(("model", "batch", "tp", "experts", "few_bits"), _MODELS)
def test_logits_are_those_of_the_reference_machine(
    model: str, batch: int, tp: int, experts: str, few_bits: str | None
) -> None:
    options = {"tp": tp, "experts": experts, "few_bits": few_bits}
    actual, expected = (
        _logits(kind, model, tokens_of(batch), **options) for kind in (Triton, Machine)
    )
    assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize(("model", "experts"), [(EIGHT_OF_MANY, "tp"), (ONE_OF_TWO, "ep")])
def test_a_launch_with_a_row_without_a_sequence(model: str, experts: str) -> None:
    """The row chooses no expert. Tokens of several steps are those of the reference machine."""
    sides = [_executor(kind, model, 2, tp=2, experts=experts) for kind in (Triton, Machine)]
    for executor in sides:
        _place(executor, torch.tensor([7]))
    tokens = [executor.run(2) for executor in sides]
    assert torch.equal(*(rows[:, 0] for rows in tokens))
    actual, expected = (executor.logits[:1] for executor in sides)
    assert relative_error(actual, expected) < EXACT
    for instruction in _instructions(sides[0], TopExperts):
        ids = sides[0].memory.tensors[instruction.at.ids]
        assert ids[1].eq(NONE).all() and ids[0].ge(0).all()


def test_a_sequence_that_has_ended() -> None:
    free = _executor(Machine, EIGHT_OF_MANY, 2)
    _place(free, tokens_of(2))
    stop = int(free.run()[0, 1])
    kernel, machine = (_executor(kind, EIGHT_OF_MANY, 2) for kind in (Triton, Machine))
    for executor in (kernel, machine):
        _place(executor, tokens_of(2), stops=(stop,))
    tokens = kernel.run(2)
    assert torch.equal(tokens, machine.run(2)) and tokens[1:, 1].eq(NONE).all()
    assert relative_error(kernel.logits, machine.logits) < EXACT


@pytest.mark.parametrize(
    ("model", "batch", "dtype", "few_bits"),
    [
        (ONE_OF_TWO, 17, F32, "int8:32"),
        (EIGHT_OF_MANY, 9, F32, None),
        pytest.param(SHARED, 9, BF16, None, marks=_SLOW),
        pytest.param(HYBRID_EXPERTS, 33, BF16, None, marks=_SLOW),
        pytest.param(EIGHT_OF_MANY, 65, F32, None, marks=_SLOW),
    ],
)
def test_a_sequence_has_the_same_bits_in_every_batch_and_order(
    model: str, batch: int, dtype: torch.dtype, few_bits: str | None
) -> None:
    """More than eight sequences have chosen an expert."""
    options = {"dtype": dtype, "few_bits": few_bits}
    logits = _logits(Triton, model, there_and_back(batch), **options)
    assert torch.equal(logits.flip(0), logits)
    assert torch.equal(_logits(Triton, model, there_and_back(1), **options)[0], logits[0])
    assert not torch.equal(logits[0], logits[1])


def test_bits_do_not_depend_on_the_workers() -> None:
    single, several = (
        _logits(Triton, EIGHT_OF_MANY, tokens_of(2), workers=count) for count in (1, 5)
    )
    assert torch.equal(single, several)


@pytest.mark.parametrize(("model", "few_bits"), [(SHARED, None), (ONE_OF_TWO, "int4:32")])
def test_16_bits(model: str, few_bits: str | None) -> None:
    """The error relative to fp32 is at most 1.5 times that of the reference machine."""
    tokens = tokens_of(2)
    exact = _logits(Machine, model, tokens, few_bits=few_bits)
    errors = [
        relative_error(_logits(kind, model, tokens, dtype=BF16, few_bits=few_bits), exact)
        for kind in (Triton, Machine)
    ]
    assert errors[0] <= 1.5 * errors[1]


def _instructions(executor: Executor, kind: type) -> list[Any]:
    return [
        instruction
        for instruction in executor.memory.program.instructions
        if isinstance(instruction, kind)
    ]


def _execute(executor: Executor, *kinds: type) -> None:
    """Run the instructions of these kinds."""
    for kind in kinds:
        for number, instruction in enumerate(executor.memory.program.instructions):
            if isinstance(instruction, kind):
                executor.execute(number, _ignore)


def _ignore(*values: object) -> None:
    """Take values, as a probe does."""


def _strange_logits(batch: int, experts: int) -> torch.Tensor:
    """Return logits of which many are equal, and some are infinite, NaN or negative zero."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (batch, experts), generator=generator).float()
    logits[1, 3], logits[1, 5] = torch.inf, -torch.inf
    logits[2, 2::3] = torch.tensor(torch.nan).copysign(torch.tensor(-1.0))
    logits[3] = -logits[3].abs()
    logits[4] = torch.tensor([0.0, -0.0]).repeat(experts // 2)
    logits[5, 1::2] = -torch.inf
    logits[6] *= 1e-42
    logits[7, 4] = torch.nan
    return logits


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("model", [EXPERTS, EIGHT_OF_MANY])
def test_equal_and_strange_logits(model: str, dtype: torch.dtype) -> None:
    """Of equal logits that of the lower number is chosen, and NaN before all others."""
    sides = [_executor(kind, model, 9, dtype=dtype) for kind in (Triton, Machine)]
    for executor in sides:
        _place(executor, tokens_of(9)[:8])
        operands = _instructions(executor, TopExperts)[0].at
        executor.memory.tensors[operands.logits].copy_(_strange_logits(9, operands.experts))
        _execute(executor, TopExperts)
    actual, expected = (
        [executor.memory.tensors[n] for n in (operands.ids, operands.scores)] for executor in sides
    )
    assert torch.equal(actual[0], expected[0]) and expected[0][8].eq(NONE).all()
    error = EXACT if dtype == F32 else torch.finfo(dtype).eps
    assert torch.allclose(actual[1].float(), expected[1].float(), error, 0, equal_nan=True)


def _choices(batch: int, chosen: int, experts: int) -> torch.Tensor:
    """Return choices of which many are the same, and none of some sequences."""
    generator = torch.Generator().manual_seed(5)
    shares = torch.rand(batch, experts, generator=generator) + 0.3 * torch.arange(experts).eq(1)
    ids = shares.argsort(1, descending=True)[:, :chosen]
    ids[3::5] = NONE
    return ids


@pytest.mark.parametrize(
    ("model", "batch", "tp", "experts", "few_bits"),
    [
        (ONE_OF_TWO, 20, 2, "ep", None),
        (EXPERTS, 20, 1, "tp", "int4:32"),
        (EXPERTS, 4, 2, "ep", None),
        (EIGHT_OF_MANY, 13, 2, "tp", None),
        (EIGHT_OF_MANY, 1, 2, "ep", None),
    ],
)
def test_rows_of_chosen_experts(
    model: str, batch: int, tp: int, experts: str, few_bits: str | None
) -> None:
    """Each sequence gets what its own experts give, and nothing else is written.

    More than eight sequences have chosen expert 1, and some sequences none.
    """
    options: dict[str, Any] = {"tp": tp, "experts": experts, "few_bits": few_bits}
    sides = [_executor(kind, model, batch, **options) for kind in (Triton, Machine)]
    for executor in sides:
        _place(executor, tokens_of(batch))
        executor.memory.forget()
        generator = torch.Generator()
        for instruction in _instructions(executor, NormExperts):
            tensors = executor.memory.tensors
            x, ids = tensors[instruction.at.normed.x], tensors[instruction.at.ids]
            x.copy_(torch.randn(x.shape, generator=generator.manual_seed(1)))
            ids.copy_(_choices(batch, instruction.at.chosen, instruction.at.experts))
        for instruction in _instructions(executor, ExpertTerms):
            scores = executor.memory.tensors[instruction.at.scores]
            scores.copy_(torch.rand(scores.shape, generator=generator.manual_seed(2)))
        _execute(executor, NormExperts, ExpertTerms)
    buffers = sides[0].memory.program.buffers
    names = {instruction.at.out for instruction in _instructions(sides[0], NormExperts)}
    names |= {instruction.at.out for instruction in _instructions(sides[0], ExpertTerms)}
    for number in names:
        actual, expected = (executor.memory.tensors[number] for executor in sides)
        assert torch.allclose(actual, expected, EXACT, EXACT, equal_nan=True), buffers[number].name
        assert not expected.isnan().all()


def test_a_rank_without_a_chosen_expert_adds_zeros() -> None:
    kernel = _executor(Triton, ONE_OF_TWO, 2, tp=2, experts="ep")
    _place(kernel, tokens_of(2))
    kernel.memory.forget()
    for instruction in _instructions(kernel, ExpertTerms):
        kernel.memory.tensors[instruction.at.ids].zero_()
        kernel.memory.tensors[instruction.at.scores].fill_(1.0)
        kernel.memory.tensors[instruction.at.x].fill_(1.0)
    _execute(kernel, ExpertTerms)
    terms = {
        instruction.at.first: instruction.at.out
        for instruction in _instructions(kernel, ExpertTerms)
    }
    assert kernel.memory.tensors[terms[0]][:2].ne(0).all()
    assert kernel.memory.tensors[terms[1]][:2].eq(0).all()


def test_no_weights_are_fetched_before_they_are_chosen() -> None:
    program = memory_of(EIGHT_OF_MANY, F32, 1, 1).program
    for instruction, (buffer, *_) in zip(program.instructions, first_weights(program), strict=True):
        known = isinstance(instruction, WeightInstruction) and not isinstance(
            instruction, MixtureInstruction
        )
        assert (buffer != NONE) == known, instruction.label


def test_more_choices_than_numbers_of_two_bytes() -> None:
    program = memory_of(EIGHT_OF_MANY, F32, 1, 1).program
    terms = next(terms for terms in program.instructions if isinstance(terms, ExpertTerms))
    many = replace(terms, at=replace(terms.at, batch=5000))
    with pytest.raises(UnsupportedError, match=r"Found 40,000.*at most 32,767 choices"):
        branch_of(program, many)
