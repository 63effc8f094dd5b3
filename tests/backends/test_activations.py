"""MLPs with other activations, with and without a gate, on every executor of programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.backends.reference.step_models import GELU, GELU_TANH, RELU, RELU2
from tests.backends.reference.stepping import Case, steps_of, steps_on, worst_error
from tests.models import TOLERANCE, relative_error
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import paths
from tpcompile.backends.triton import Triton
from tpcompile.errors import UsageError, VerifyError
from tpcompile.ir.ops import Activation
from tpcompile.vm.groups import NormUpActivation
from tpcompile.vm.program import Program, abi
from tpcompile.vm.program.encoding import decode_program, encode_program
from tpcompile.vm.program.operands import verify_operands
from tpcompile.vm.program.text import format_program, parse_program

MODELS = {
    GELU: (Activation.GELU, 2),
    GELU_TANH: (Activation.GELU_TANH, 2),
    RELU: (Activation.RELU, 2),
    RELU2: (Activation.RELU2, 1),
}
"""The activation of each model, and its projections before the activation."""
EACH = pytest.mark.parametrize("model", MODELS)


def _case(model: str) -> Case:
    return Case(model, tp=2, lengths=(5, 3))


def _native(case: Case, path: str | None = None, steps: int = 3) -> list[torch.Tensor]:
    native = Native(case.memory(), path)
    logits = steps_on(native, case, steps)
    native.close()
    return logits


@EACH
def test_the_reference_machine_computes_eager_s_steps(model: str) -> None:
    case = _case(model)
    activations = [
        instruction
        for instruction in case.program.instructions
        if isinstance(instruction, NormUpActivation)
    ]
    assert {(instruction.at.activation, instruction.at.sides) for instruction in activations} == {
        MODELS[model]
    }
    assert worst_error(case, steps_of(case, 3)) < TOLERANCE


@EACH
@pytest.mark.parametrize("path", paths())
def test_native_steps_are_eager_s_for_any_schedule(model: str, path: str) -> None:
    """The logits are those of eager, with the same bits for all schedules and thread counts."""
    case = _case(model)
    wanted = _native(case, path)
    assert worst_error(case, wanted) < TOLERANCE
    for workers, lowering in product((1, 5), ("heads", "rows")):
        other = replace(case, workers=workers, lowering=lowering, policy="dynamic")
        assert all(map(torch.equal, _native(other, path), wanted)), (workers, lowering)


@EACH
def test_triton_steps_are_those_of_the_reference_machine(model: str) -> None:
    case = _case(model)
    (actual,), (expected,) = steps_on(Triton(case.memory()), case, 1), steps_of(case, 1)
    assert relative_error(actual, expected) < TOLERANCE


@EACH
def test_programs_are_read_back_from_text_and_words(model: str) -> None:
    program = _case(model).program
    text = format_program(program)
    assert f" activation={MODELS[model][0].name.lower()}" in text
    assert parse_program(text) == program
    assert decode_program(encode_program(program), program) == program


def _with(program: Program, **changes: int) -> Program:
    """Change shared operands of the first instruction of an activation."""
    number = next(
        n
        for n, instruction in enumerate(program.instructions)
        if isinstance(instruction, NormUpActivation)
    )
    instructions = list(program.instructions)
    instruction: Any = instructions[number]
    instructions[number] = replace(instruction, at=replace(instruction.at, **changes))
    return replace(program, instructions=tuple(instructions))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (RELU2, {"sides": 2}, r"weight = .*sides\*ffn=80"),
        (GELU, {"sides": 1}, r"weight = .*sides\*ffn=40"),
        (GELU, {"sides": 3}, r"weight = .*sides\*ffn=120"),
        (GELU, {"ffn": 20}, r"weight = .*sides\*ffn=40"),
    ],
)
def test_operands_that_disagree_with_the_weight(
    model: str, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_operands(_with(_case(model).program, **changes))


def test_an_unknown_activation_in_words_or_text() -> None:
    program = _case(RELU).program
    encoded = encode_program(program)
    rows = encoded.words[:, 0] == NormUpActivation.opcode
    encoded.words[rows, abi.constants()["NORM_UP_ACTIVATION_ACTIVATION"]] = 9
    with pytest.raises(UsageError, match="9 is not a valid Activation"):
        decode_program(encoded, program)
    with pytest.raises(UsageError, match="softmax"):
        parse_program(format_program(program).replace("activation=relu", "activation=softmax"))
