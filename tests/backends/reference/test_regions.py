"""What instructions say that they touch is what they touch: all that is proved rests on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.backends.reference.stepping import Case, tables_of, texts
from tpcompile.backends.reference import Machine
from tpcompile.vm.instructions import StepInstruction
from tpcompile.vm.region import Region

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


def _mask(machine: Machine, number: int, regions: Iterable[Region]) -> torch.Tensor:
    """The elements of a buffer that lie in some regions."""
    buffer = machine.program.buffers[number]
    mask = torch.zeros(machine.memory[number].shape, dtype=torch.bool)
    for region in regions:
        if region.buffer != number:
            continue
        if buffer.kind != "cache":
            mask[tuple(slice(*interval) for interval in region.box)] = True
            continue
        layers, sides, sequences, heads, ages = (slice(*interval) for interval in region.box)
        for slot in _slots(machine, sequences, ages):
            mask[layers, sides, slot, heads] = True
    return mask


def _slots(machine: Machine, sequences: slice, ages: slice) -> list[int]:
    """Where the past of some sequences lies, or their new token, or both."""
    found = []
    lengths, tables = machine.values("lengths")[0], machine.values("tables")[0]
    for length, table in zip(lengths[sequences].tolist(), tables[sequences], strict=True):
        first, last = ((0, length - 1), (length - 1, length), (0, length))[
            0 if ages == slice(0, 1) else 1 if ages == slice(1, 2) else 2
        ]
        found += [int(table[at // 4]) * 4 + at % 4 for at in range(first, last)]
    return found


def _joined(instruction: StepInstruction) -> list[Region]:
    return [join.region for join in instruction.joins]


def _spoilt(machine: Machine, instruction: StepInstruction) -> list[torch.Tensor]:
    """All memory, with nonsense wherever the instruction says that it does not read."""
    may = [*instruction.reads, *_joined(instruction)]
    found = []
    for number, tensor in enumerate(machine.memory):
        wrong = torch.nan if tensor.is_floating_point() else -(2**30)
        found.append(tensor.where(_mask(machine, number, may), torch.tensor(wrong).to(tensor)))
    return found


def test_nothing_else_is_read_or_written(machine: Machine) -> None:
    with torch.inference_mode():
        for instruction in _steps(machine):
            before = [tensor.clone() for tensor in machine.memory]
            elsewhere = _spoilt(machine, instruction)
            instruction.run(machine.memory)
            instruction.run(elsewhere)
            for number, found in enumerate(machine.memory):
                written = _mask(machine, number, [*instruction.writes, *_joined(instruction)])
                _assert_same(found[~written], before[number][~written], instruction)
                _assert_same(elsewhere[number][written], found[written], instruction)


def _steps(machine: Machine) -> list[Any]:
    """All but the last, which writes down one row of the history and says that it may any."""
    return [one for one in machine.program.instructions if one.name != "argmax"]  # type: ignore[attr-defined]


def _assert_same(one: torch.Tensor, other: torch.Tensor, instruction: StepInstruction) -> None:
    same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert same, instruction.label
