"""Meanings are put to numbers: ops on whole values give what the instructions store in tiles.

A meaning is called with the tensors of a step on the reference machine instead of terms, so that it
runs the ops that it names. Then the instructions run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.backends.reference.stepping import Case, tables_of, texts
from tests.vm.mutants.table import all_bases
from tpcompile.backends.reference import Machine
from tpcompile.ir.kv import stored_rows
from tpcompile.ir.ops.experts import chosen
from tpcompile.vm.groups.kv import NEW
from tpcompile.vm.program import Role
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.meaning import Part
from tpcompile.vm.program.weight import Weight
from tpcompile.vm.proof.running import groups_of, heads_of, runs_of

SUBJECTS = (0, 1, 13, 33, 34, 36, 37, 38, 39, 44, 45, 46, 47)
"""Bases with all kinds of instructions, with and without biases, splits and few bits."""
_NEAR = 2e-5


class Numbers:
    """The tensors that a meaning reads; functions that are no ops are defined here once more."""

    def __init__(self, machine: Machine, instructions: Sequence[Any]) -> None:
        self._program, self._memory = machine.memory.program, machine.memory.tensors
        self._own, self._new = instructions, dict[str, Any]()

    @property
    def heads(self) -> Sequence[int]:
        return heads_of(self._own)

    def number(self, operand: str) -> int:
        value = vars(self._own[0]).get(operand)
        if value is None:
            value = self._own[0].at
            for name in operand.split("."):
                value = getattr(value, name)
        assert isinstance(value, int)
        return value

    def __getitem__(self, operand: str) -> Any:
        return None if self.number(operand) == NONE else self.part(operand)

    def part(self, operand: str, *part: Part, rank: int | None = None) -> Any:
        number = self.number(operand) + (rank or 0)
        buffer, tensor = self._program.buffers[number], self._memory[number]
        if isinstance(tensor, Weight):
            tensor = tensor[:]
        if buffer.role == Role.CACHE:
            return tensor
        if buffer.role in (Role.TAILS, Role.STATES):  # ops store into the tensor
            return self._new.setdefault(operand, tensor.clone())
        if tensor.dtype == torch.int32:
            tensor = tensor.long()
        if operand == "weight" and hasattr(self._own[0].at, "held"):
            operands = self._own[0].at
            tensor = tensor.view(operands.held, -1, tensor.shape[-1])
        return tensor[_index(part)].clone()

    def shape(self, operand: str) -> tuple[int, ...]:
        return self._program.buffers[self.number(operand)].shape

    def input(self, name: str) -> Any:
        assert name == "starts"
        return torch.arange(1 + self.shape("lengths")[0])

    def new(self, operand: str) -> Any:
        return self._new[operand][self._own[0].at.layer]

    def call(self, name: str, *operands: Any) -> Any:
        return getattr(self, name.replace(" ", "_"))(*operands)

    def sum(self, *terms: Any) -> Any:
        return torch.stack([term.float().expand_as(terms[0]) for term in terms]).sum(0)

    def rows(self, table: Any, places: Any) -> Any:
        return table[places]

    def linear_of_columns(self, x: Any, weight: Any, start: int, stop: int) -> Any:
        return x[:, start:stop].float() @ weight[:, start:stop].float().T

    def cached_tokens(self, layer: int, *new: Any) -> Any:
        return new[0]

    def slots(self, lengths: Any, tables: Any, block: int) -> Any:
        places = lengths - 1
        return tables[range(len(tables)), places // block] * block + places % block

    def stored(self, new: Any, slots: Any) -> Any:
        return new, slots

    def gated_experts(self, x: Any, ids: Any, gate_up: Any, first: int) -> Any:
        activated = torch.full((*ids.shape, gate_up.shape[1] // 2), torch.nan)
        for expert, tokens, places in chosen(ids, first, len(gate_up)):
            gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, -1)
            activated[tokens, places] = torch.nn.functional.silu(gate) * up
        return activated

    def sum_of_experts(self, x: Any, scores: Any, ids: Any, down: Any, first: int) -> Any:
        total = torch.zeros(len(x), down.shape[1])
        for expert, tokens, places in chosen(ids, first, len(down)):
            shares = scores[tokens, places].float()[:, None]
            total[tokens] += x[tokens, places].float() @ down[expert].float().T * shares
        return total

    def best_of_rows(self, logits: Any, start: int, stop: int) -> Any:
        return logits[:, start:stop].max(-1, keepdim=True).values

    def its_row(self, logits: Any, start: int, stop: int, first: int) -> Any:
        return logits[:, start:stop].max(-1, keepdim=True).indices + start + first


def _index(part: Sequence[Part]) -> tuple[Any, ...]:
    return tuple(
        slice(None) if dim is None else slice(dim, dim + 1) if isinstance(dim, int) else dim.slice
        for dim in part
    )


def _stored(numbers: Numbers, meaning: Any) -> tuple[Any, Any]:
    """Return what instructions have stored of a value, and the value in the same form."""
    number = numbers.number(meaning.operand)
    buffer, tensor = numbers._program.buffers[number], numbers._memory[number]
    if buffer.role == Role.CACHE:
        layer, side, *_, new = meaning.part
        assert new == NEW
        values, slots = meaning.value
        wanted = stored_rows(values, tensor[layer, side])
        return tensor[layer, side][slots], wanted
    if buffer.role in (Role.TAILS, Role.STATES):
        return tensor[meaning.part[0]], meaning.value
    return tensor[_index(meaning.part)], meaning.value


def _machine(case: Case) -> Machine:
    machine = case.machine()
    rows = texts(case.model, case.lengths)
    tokens = [row[n - 1] for row, n in zip(rows, case.lengths, strict=True)]
    machine.place(torch.stack(tokens), torch.tensor(case.lengths), tables_of(case.lengths))
    return machine


@pytest.mark.parametrize("subject", SUBJECTS)
def test_meanings_give_what_instructions_store(subject: int) -> None:
    base = all_bases()[subject]
    machine = _machine(base.case)
    program = machine.memory.program
    with torch.inference_mode():
        for _, run in runs_of(program.instructions):
            if run[0].name == "argmax":
                continue
            wanted = []
            for _, group in groups_of(0, run):
                numbers = Numbers(machine, group)
                wanted += [(numbers, meaning) for meaning in group[0].meaning(numbers)]
            for instruction in run:
                instruction.run(machine.memory.tensors)
            for numbers, meaning in wanted:
                got, value = _stored(numbers, meaning)
                where = f"{run[0].label}: {meaning.operand}"
                assert got.numel() == value.numel(), where
                _assert_near(got.float().flatten(), value.float().flatten(), where)


def _assert_near(got: torch.Tensor, value: torch.Tensor, where: str) -> None:
    present = ~value.isnan()  # experts of other ranks, and states that no sequence has
    if not present.any():
        return
    scale = value[present].abs().max().clamp(min=1.0)
    assert bool(((got - value)[present].nan_to_num(nan=1e9).abs() <= _NEAR * scale).all()), where


def test_the_subjects_have_all_kinds_of_instructions() -> None:
    kinds = {step.name for place in SUBJECTS for step in all_bases()[place].steps}
    assert kinds == {name for name in INSTRUCTIONS if INSTRUCTIONS[name].opcode < 256}
