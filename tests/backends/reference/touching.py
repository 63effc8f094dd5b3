"""What an instruction touches when it runs, beside what it says that it touches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.backends.reference.stepping import BLOCK
from tpcompile.backends.reference import Machine
from tpcompile.vm.program import Region, Role
from tpcompile.vm.program.instruction import StepInstruction


def mask(machine: Machine, number: int, regions: Iterable[Region]) -> torch.Tensor:
    """The elements of a buffer that lie in some regions."""
    buffer = machine.memory.program.buffers[number]
    found = torch.zeros(machine.memory.tensors[number].shape, dtype=torch.bool)
    for region in regions:
        if region.buffer != number:
            continue
        if buffer.role.kind != "cache":
            found[tuple(slice(*interval) for interval in region.box)] = True
            continue
        layers, sides, sequences, heads, ages = (slice(*interval) for interval in region.box)
        for slot in _slots(machine, sequences, ages):
            found[layers, sides, slot, heads] = True
    return found


def _slots(machine: Machine, sequences: slice, ages: slice) -> list[int]:
    """Where the past of some sequences lies, or their new token, or both."""
    found = []
    lengths, tables = machine.memory.values(Role.LENGTHS)[0], machine.memory.values(Role.TABLES)[0]
    for length, table in zip(lengths[sequences].tolist(), tables[sequences], strict=True):
        first, last = ((0, length - 1), (length - 1, length), (0, length))[
            0 if ages == slice(0, 1) else 1 if ages == slice(1, 2) else 2
        ]
        found += [int(table[at // BLOCK]) * BLOCK + at % BLOCK for at in range(first, last)]
    return found


def joined(instruction: StepInstruction) -> list[Region]:
    return [join.region for join in instruction.joins]


def spoilt_elsewhere(machine: Machine, instruction: StepInstruction) -> list[torch.Tensor]:
    """All memory, with nonsense wherever the instruction says that it does not read."""
    may = [*instruction.reads, *joined(instruction)]
    found = []
    for number, tensor in enumerate(machine.memory.tensors):
        wrong = torch.nan if tensor.is_floating_point() else -(2**30)
        found.append(tensor.where(mask(machine, number, may), torch.tensor(wrong).to(tensor)))
    return found
