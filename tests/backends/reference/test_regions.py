"""Instructions access exactly the regions that they declare; all proofs rely on this."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.reference.step_models import HYBRID_EXPERTS, WHOLE
from tests.backends.reference.stepping import Case, tables_of, texts
from tpcompile.backends.reference import Machine
from tpcompile.backends.reference.regions import verify_regions
from tpcompile.errors import VerifyError
from tpcompile.vm.program import Region, Role
from tpcompile.vm.program.instruction_set import INSTRUCTIONS

CASES = {
    "heads": Case("tiny-qwen3", lengths=(3, 9), lowering="heads"),
    "rows, biases, splits, 2 ranks": Case(
        "tiny-qwen2", 2, lengths=(3, 9), lowering="rows", column_splits=2
    ),
    "interleaved, 3 ranks": Case("tiny-qwen3", 3, lengths=(5,), lowering="rows", interleaved=True),
    "a cache in int8": Case("tiny-qwen3", 2, lengths=(3, 9), kv="int8"),
    "linear attention": Case("tiny-qwen3.5", 2, lengths=(1, 9), lowering="rows"),
    "whole experts on 3 ranks": Case(WHOLE, 3, lengths=(3, 9, 5)),
    "experts, one of them shared": Case(HYBRID_EXPERTS, 2, lengths=(1, 9)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def machine(request: pytest.FixtureRequest) -> Machine:
    return _placed(request.param)


def _placed(case: Case) -> Machine:
    executor = case.machine()
    lengths = torch.tensor(case.lengths)
    rows = texts(case.model, case.lengths)
    tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
    states = torch.arange(len(tokens))
    write = states.flip(0) + len(tokens)
    executor.place(torch.stack(tokens), lengths, tables_of(case.lengths), read=states, write=write)
    return executor


def test_nothing_else_is_read_or_written(machine: Machine) -> None:
    verify_regions(machine.memory)


@pytest.mark.parametrize("case", ["heads", "a cache in int8"])
@pytest.mark.parametrize("dim", range(5))
def test_rows_of_another_layer_side_sequence_head_or_age(
    monkeypatch: pytest.MonkeyPatch, case: str, dim: int
) -> None:
    """A region that leaves out a part of the cache is refused; a row includes its scale."""
    machine = _placed(CASES[case])
    kind, buffers = INSTRUCTIONS["partial_attention"], machine.memory.program.buffers
    true = kind.reads.func

    def narrowed(instruction: Any) -> tuple[Region, ...]:
        return tuple(
            Region(number, (*box[:dim], (box[dim][1] - 1, box[dim][1]), *box[dim + 1 :]))
            if buffers[number].role == Role.CACHE and box[dim][1] - box[dim][0] > 1
            else Region(number, (*box[:dim], (0, 0), *box[dim + 1 :]))
            if buffers[number].role == Role.CACHE
            else Region(number, box)
            for number, box in true(instruction)
        )

    monkeypatch.setattr(kind, "reads", property(narrowed))
    with pytest.raises(VerifyError, match="partial_attention are wrong"):
        verify_regions(machine.memory)


@pytest.mark.parametrize(
    ("name", "side", "less", "message"),
    [
        ("linear_residual", "reads", slice(1, None), "from undeclared reads"),
        ("partial_attention", "writes", slice(1), "partial_lse outside of its"),
        ("argmax", "reads", slice(-1), "raises IndexError if undeclared reads"),
    ],
    ids=["read", "write", "last read"],
)
def test_untrue_regions_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, side: str, less: slice, message: str
) -> None:
    machine = _placed(CASES["heads"])
    kind = INSTRUCTIONS[name]
    true = getattr(kind, side).func
    monkeypatch.setattr(kind, side, property(lambda instruction: true(instruction)[less]))
    with pytest.raises(VerifyError, match=rf"The regions of {name} are wrong: .* {message}"):
        verify_regions(machine.memory)
