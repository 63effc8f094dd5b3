"""A program as int32 arrays, the form that executors read.

An instruction is a row of words; all rows have the same width. Queues, waits and signals are lists
of different lengths. They are stored as concatenated values with an array of offsets, so that an
executor does not compute the offsets again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.vm.program.instruction import NONE, StepInstruction, WeightInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, decode, encode
from tpcompile.vm.program.operands import verify_operands
from tpcompile.vm.program.program import Instruction, Program, Wait


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of different lengths, as concatenated values and offsets."""

    offsets: torch.Tensor
    """`[lists + 1]`: the start of each list in `values`, then the end of the last list."""
    values: torch.Tensor
    """`[n]`, or `[n, 2]` for pairs."""

    def __iter__(self) -> Iterator[list[Any]]:
        edges, values = self.offsets.tolist(), self.values.tolist()
        for start, stop in pairwise(edges):
            yield values[start:stop]


@dataclass(frozen=True, eq=False)
class EncodedProgram:
    """A program without its buffers, as int32 arrays."""

    words: torch.Tensor
    """`[instructions, words]`."""
    queues: Lists
    """The instructions of each queue."""
    waits: Lists
    """For each instruction, pairs of a counter and the value that it must have reached."""
    signals: Lists
    """For each instruction, the counters that it signals."""
    totals: torch.Tensor
    """`[counters]`: the signals of each counter per step, by which waits grow from step to step."""

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return all arrays by name, contiguous: `queue_offsets` and `queue_values` for queues."""
        arrays = {"words": self.words, "totals": self.totals}
        for name in ("queue", "wait", "signal"):
            lists: Lists = getattr(self, f"{name}s")
            arrays |= {f"{name}_offsets": lists.offsets, f"{name}_values": lists.values}
        return {name: array.contiguous() for name, array in arrays.items()}


def encode_program(program: Program) -> EncodedProgram:
    """Encode a program as int32 arrays."""
    signals = _lists(program.signals)
    return EncodedProgram(
        program_words(program.instructions),
        _lists(program.queues),
        _lists(program.waits, pairs=True),
        signals,
        torch.bincount(signals.values, minlength=program.counters).int(),
    )


def decode_program(encoded: EncodedProgram, like: Program, check: bool = True) -> Program:
    """Decode the arrays of a program, and take its buffers and options from `like`.

    Raise a UsageError if operands do not agree with the buffers. `check=False` turns this check
    off, to inspect a broken program.
    """
    shared: dict[Any, Any] = {}
    program = replace(
        like,
        instructions=tuple(decode(words, shared) for words in encoded.words.tolist()),
        queues=tuple(map(tuple, encoded.queues)),
        waits=tuple(tuple(Wait(*pair) for pair in waits) for waits in encoded.waits),
        signals=tuple(map(tuple, encoded.signals)),
    )
    if check:
        verify_operands(program, UsageError)
    return program


def program_words(instructions: Sequence[Instruction]) -> torch.Tensor:
    """Encode each instruction as a row of words. Shared operands are encoded once."""
    shared: dict[int, list[int]] = {}
    rows = [encode(_encodable(instruction), shared) for instruction in instructions]
    if not rows:
        return torch.empty((0, INSTRUCTIONS.words), dtype=torch.int32)
    words = torch.tensor(rows, dtype=torch.int64)
    strange = ((words < -(2**31)) | (words >= 2**31)).any(1).nonzero()
    if len(strange):
        number = int(strange[0])
        raise UnsupportedError(
            "An operand does not fit in a 32-bit word",
            where=f"{instructions[number].label} (instruction {number})",
            got=str(max(rows[number], key=abs)),
            expected="a value from -2147483648 to 2147483647",
        )
    return words.int()


def first_weights(program: Program) -> torch.Tensor:
    """Return `[instructions, 3]`: the buffer, the first byte and the bytes of the first weights.

    The buffer is -1 if an instruction has no weights, or chooses them in the step. No instruction
    writes weights, so a worker fetches them before its waits are met.
    """
    rows = [_first_weights(program, instruction) for instruction in program.instructions]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _first_weights(program: Program, instruction: Instruction) -> tuple[int, int, int]:
    box = instruction.first_box if isinstance(instruction, WeightInstruction) else None
    if not isinstance(instruction, WeightInstruction) or box is None:
        return NONE, 0, 0
    number: int = instruction.at.weight
    (first, last), (start, _) = box
    values = instruction.at.format.values
    row = values.row_bytes(0, program.buffers[number].shape[1])
    skipped = values.row_bytes(0, start - start % values.columns)
    return number, first * row + skipped, (last - first) * row - skipped


def families(program: Program) -> torch.Tensor:
    """Return `[instructions]`: the first instruction of the family of each.

    A family multiplies rows of one weight by the same values, one instruction after the other, so
    an executor may prepare the values for a whole family.
    """
    firsts: list[int] = []
    before: Instruction | None = None
    for number, instruction in enumerate(program.instructions):
        firsts.append(
            firsts[-1] if before is not None and _continues(before, instruction) else number
        )
        before = instruction
    return torch.tensor(firsts, dtype=torch.int32)


def _continues(before: Instruction, instruction: Instruction) -> bool:
    """Return whether an instruction multiplies by the values of the one before it."""
    if not isinstance(instruction, WeightInstruction) or type(before) is not type(instruction):
        return False
    if before.at.weight != instruction.at.weight or before.source != instruction.source:
        return False
    same = all(getattr(before, name) == getattr(instruction, name) for name in instruction.apart)
    return same and all(region.buffer != instruction.source.x for region in before.writes)


def _encodable(instruction: Instruction) -> StepInstruction:
    if isinstance(instruction, StepInstruction) and type(instruction) in INSTRUCTIONS.values():
        return instruction
    raise UnsupportedError(
        f"{instruction.name} has no opcode",
        where=instruction.label,
        expected=f"one of the instructions {', '.join(INSTRUCTIONS)}",
    )


def _lists(lists: Sequence[Sequence[Any]], pairs: bool = False) -> Lists:
    offsets = torch.zeros(len(lists) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor([len(items) for items in lists], dtype=torch.int32).cumsum(0)
    values = torch.tensor([value for items in lists for value in items], dtype=torch.int32)
    return Lists(offsets, values.reshape(-1, 2) if pairs else values)
