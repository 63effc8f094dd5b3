"""Determine on the machine whether regions are true and whether order matters.

The instruction runs on the memory of a real step, once unchanged and once with random values in
everything that it does not declare as read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tests.backends.reference.stepping import tables_of, texts
from tests.vm.mutants.bases import Base
from tpcompile.backends.reference import Machine, held_back, in_program_order, shuffled
from tpcompile.backends.reference.regions import mask, spoilt_elsewhere, values_of
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.program import joined
from tpcompile.vm.program.region import refusal


class Truth:
    """A machine with the memory of a completed step, on which mutants are run."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._machine = self._placed(base.program)
        before = {
            n: t.clone() for n, t in enumerate(self._machine.memory.tensors) if self._is_state(n)
        }
        self._machine.run(1)
        for number, tensor in before.items():
            self._machine.memory.tensors[number].copy_(tensor)

    def _is_state(self, number: int) -> bool:
        return self.base.program.buffers[number].role.kind == "state"

    def _placed(self, program: Program) -> Machine:
        case = self.base.case
        machine, lengths = case.machine(), torch.tensor(case.lengths)
        rows = texts(case.model, case.lengths)
        tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
        machine.place(torch.stack(tokens), lengths, tables_of(case.lengths))
        machine.memory.program = program
        return machine

    def told_by(self, instruction: Any) -> bool:
        """Return whether the instruction runs and accesses exactly its declared regions."""
        regions = [*instruction.reads, *instruction.writes, *joined(instruction)]
        buffers, machine = self.base.program.buffers, self._machine
        for buffer, box in regions:
            if not 0 <= buffer < len(buffers) or refusal(box, buffers[buffer].shape):
                return False
        held = machine.memory.tensors
        try:
            machine.memory.tensors = [tensor.clone() for tensor in values_of(machine.memory)]
            for number, buffer in enumerate(buffers):
                if buffer.role == Role.ARRIVALS:
                    machine.memory.tensors[number].fill_(getattr(instruction, "blocks", 1) - 1)
            before = [tensor.clone() for tensor in machine.memory.tensors]
            elsewhere = spoilt_elsewhere(machine.memory, instruction)
            spoilt = [tensor.clone() for tensor in elsewhere]
            written = [*instruction.writes, *joined(instruction)]
            masks = [
                mask(machine.memory, number, written, Role.WRITE) for number in range(len(held))
            ]
            with torch.inference_mode():
                instruction.run(machine.memory.tensors)
                instruction.run(elsewhere)
            return all(
                _same_where(~written, new, old)
                and _same_where(~written, other, ruined)
                and _same_where(written & _differ(new, old), new, other)
                for written, new, old, other, ruined in zip(
                    masks, machine.memory.tensors, before, elsewhere, spoilt, strict=True
                )
            )
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            return False
        finally:
            machine.memory.tensors = held

    def comes_right(self, program: Program, number: int, seed: int) -> bool:
        """Return whether other legal orders give the result of program order."""
        right = self._result(program, in_program_order)
        for order in (held_back(number, seed), shuffled(seed)):
            if not all(map(_alike, self._result(program, order), right)):
                return False
        return True

    def _result(self, program: Program, order: Any) -> list[torch.Tensor]:
        machine = self._placed(program)
        machine.run(1, order)
        kinds = ("state", "cache")
        numbers = [n for n, buffer in enumerate(program.buffers) if buffer.role.kind in kinds]
        return [machine.logits, *(machine.memory.tensors[number] for number in numbers)]


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal; NaN equals NaN."""
    return torch.equal(tensor.nan_to_num(nan=-9e9), other.nan_to_num(nan=-9e9))


def _differ(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(nan=-9e9) != other.nan_to_num(nan=-9e9)


def _same_where(where: torch.Tensor, tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return not bool((_differ(tensor, other) & where).any())


@lru_cache(maxsize=4)
def truth_of(base: Base) -> Truth:
    return Truth(base)
