"""A check that instructions touch only the regions that they declare, by running them.

The verifier trusts declared regions, so its proofs are void if they are wrong. Authors of
instructions use this check in tests. It copies the memory for each instruction, so use it with
small models.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

import torch

from tpcompile.backends.memory import StepMemory
from tpcompile.errors import VerifyError
from tpcompile.ir.kv import nan_element
from tpcompile.vm.program import Region, Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.program.program import joined
from tpcompile.vm.program.weight import Weight

_NONSENSE = -(2**30)
"""The value of integers outside of the declared reads of an instruction."""


def verify_regions(memory: StepMemory) -> None:
    """Run one step, after `place` and in sequential order; raise at the first wrong region.

    Regions are wrong if the instruction writes outside of them, or if its results change when all
    memory that it does not declare to read is replaced by nonsense.
    """
    with torch.inference_mode():
        for instruction in memory.program.instructions:
            assert isinstance(instruction, StepInstruction)
            _verify(memory, instruction)


def _verify(memory: StepMemory, instruction: StepInstruction) -> None:
    tensors, elsewhere = values_of(memory), spoilt_elsewhere(memory, instruction)
    before = [[tensor.clone() for tensor in side] for side in (tensors, elsewhere)]
    instruction.run(tensors)
    try:
        instruction.run(elsewhere)
    except Exception as error:
        fault = f"raises {type(error).__name__} if undeclared reads return nonsense"
        raise _untrue(instruction, fault) from error
    writes = [*instruction.writes, *joined(instruction)]
    for number, (now, spoilt) in enumerate(zip(tensors, elsewhere, strict=True)):
        name = memory.program.buffers[number].name
        touched = ~same(now, before[0][number]) | ~same(spoilt, before[1][number])
        if bool((touched & ~mask(memory, number, writes, Role.WRITE)).any()):
            raise _untrue(instruction, f"writes {name} outside of its regions")
        if not bool(same(now, spoilt)[touched].all()):
            raise _untrue(instruction, f"writes {name} from undeclared reads")


def _untrue(instruction: StepInstruction, fault: str) -> VerifyError:
    return VerifyError(
        f"The regions of {instruction.name} are wrong: it {fault}",
        where=instruction.label,
        hint="Declare every region that `run` touches in `reads`, `writes` or `joins`",
    )


def same(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return which elements are equal; NaN is equal to NaN."""
    return (tensor == other) | (tensor.isnan() & other.isnan())


def mask(memory: StepMemory, number: int, regions: Iterable[Region], states: Role) -> torch.Tensor:
    """Return which elements of a buffer are in some regions.

    `states` is the input with the numbers of the states: those that sequences read, or write.
    """
    buffer = memory.program.buffers[number]
    covered = torch.zeros(memory.tensors[number].shape, dtype=torch.bool)
    for region in regions:
        if region.buffer != number:
            continue
        box = tuple(slice(*interval) for interval in region.box)
        if buffer.role == Role.CACHE:
            layers, sides, sequences, heads, ages = box
            for slot in _slots(memory, sequences, ages):
                covered[layers, sides, slot, heads] = True
        elif buffer.role in LINEAR_STATES:
            layers, sequences, part = box
            inner = (slice(None), part) if buffer.role == Role.TAILS else (part,)
            for state in _states(memory, sequences, states):
                covered[(layers, state, *inner)] = True
        else:
            covered[box] = True
    return covered


def _states(memory: StepMemory, rows: slice, states: Role) -> list[int]:
    """Return the states that rows read or write.

    Rows read the state that their sequence resumes from, and the state of the row before them.
    """
    numbers: list[int] = memory.values(states)[0][rows].tolist()
    if states == Role.WRITE:
        return numbers
    firsts = set(memory.starts)
    inner = {row for row in range(memory.starts[-1]) if row not in firsts}
    before = [state for row, state in enumerate(numbers, rows.start) if row not in inner]
    return before + memory.values(Role.WRITE)[0][rows].tolist()[:-1]


def _slots(memory: StepMemory, sequences: slice, ages: slice) -> list[int]:
    """Return the slots of rows: of the tokens before the step, of the new token, or of both."""
    lengths, tables = memory.values(Role.LENGTHS)[0].tolist(), memory.values(Role.TABLES)[0]
    before = [max(length - 1, 0) for length in lengths]
    for first, end in pairwise(memory.starts):
        before[first:end] = before[first : first + 1] * (end - first)
    block = memory.block
    slots: list[int] = []
    for row in range(*sequences.indices(len(lengths))):
        past, new = range(before[row]), range(max(lengths[row] - 1, 0), lengths[row])
        places = chain(*(past, new)[ages])
        slots += [int(tables[row, place // block]) * block + place % block for place in places]
    return slots


def values_of(memory: StepMemory) -> list[torch.Tensor]:
    """Return all memory, with the values of weights that have several components."""
    return [tensor[:] if isinstance(tensor, Weight) else tensor for tensor in memory.tensors]


def spoilt_elsewhere(memory: StepMemory, instruction: StepInstruction) -> list[torch.Tensor]:
    """Return a copy of all memory, with nonsense outside of the instruction's declared reads."""
    allowed = list(chain(instruction.reads, joined(instruction)))
    copies = []
    for number, tensor in enumerate(values_of(memory)):
        wrong = torch.nan if tensor.is_floating_point() else _NONSENSE
        if memory.program.buffers[number].role == Role.CACHE:
            wrong = nan_element(tensor)
        readable = mask(memory, number, allowed, Role.READ)
        copies.append(tensor.where(readable, torch.tensor(wrong).to(tensor)))
    return copies
