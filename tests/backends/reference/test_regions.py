"""What instructions say that they touch is what they touch: all that is proved rests on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.reference.stepping import Case, tables_of, texts
from tests.backends.reference.touching import joined, mask, spoilt_elsewhere
from tpcompile.backends.reference import Machine
from tpcompile.vm.program.instruction import StepInstruction

CASES = {
    "heads": Case("tiny-qwen3", lengths=(3, 9), lowering="heads"),
    "rows, biases, splits, 2 ranks": Case(
        "tiny-qwen2", 2, lengths=(3, 9), lowering="rows", column_splits=2
    ),
    "interleaved, 3 ranks": Case("tiny-qwen3", 3, lengths=(5,), lowering="rows", interleaved=True),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def machine(request: pytest.FixtureRequest) -> Machine:
    case: Case = request.param
    found = case.machine()
    lengths = torch.tensor(case.lengths)
    rows = texts(case.model, case.lengths)
    tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
    found.place(torch.stack(tokens), lengths, tables_of(case.lengths))
    return found


def test_nothing_else_is_read_or_written(machine: Machine) -> None:
    with torch.inference_mode():
        for instruction in _steps(machine):
            before = [tensor.clone() for tensor in machine.memory.tensors]
            elsewhere = spoilt_elsewhere(machine, instruction)
            instruction.run(machine.memory.tensors)
            instruction.run(elsewhere)
            for number, found in enumerate(machine.memory.tensors):
                written = mask(machine, number, [*instruction.writes, *joined(instruction)])
                _assert_same(found[~written], before[number][~written], instruction)
                _assert_same(elsewhere[number][written], found[written], instruction)


def _steps(machine: Machine) -> list[Any]:
    """All but the last, which writes down one row of the history and says that it may any."""
    return [one for one in machine.memory.program.instructions if one.name != "argmax"]  # type: ignore[attr-defined]


def _assert_same(one: torch.Tensor, other: torch.Tensor, instruction: StepInstruction) -> None:
    same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert same, instruction.label
