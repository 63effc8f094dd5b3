"""A program as arrays of int32, which is what executors read: no offsets to work out again.

An instruction is a row of words, all rows of the same width. Queues, waits and signals are lists
of different lengths: their values one after the other, and where each of them begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, decode, encode
from tpcompile.vm.program.operands import verify_operands
from tpcompile.vm.program.program import Instruction, Program, Wait


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of different lengths."""

    offsets: torch.Tensor
    """`[lists + 1]`: where each begins among the values, and where the last one ends."""
    values: torch.Tensor
    """`[n]`, or `[n, 2]` for pairs."""

    def __iter__(self) -> Iterator[list[Any]]:
        edges, values = self.offsets.tolist(), self.values.tolist()
        for start, stop in pairwise(edges):
            yield values[start:stop]


@dataclass(frozen=True, eq=False)
class EncodedProgram:
    """All of a program but its buffers, in int32."""

    words: torch.Tensor
    """`[instructions, words]`."""
    queues: Lists
    """The instructions of each queue."""
    waits: Lists
    """By instruction, a counter and what it must have come to."""
    signals: Lists
    """By instruction, the counters that it raises."""
    totals: torch.Tensor
    """`[counters]`: how often each is raised in one step, by which waits of later steps grow."""


def encode_program(program: Program) -> EncodedProgram:
    """The arrays of a program."""
    signals = _lists(program.signals)
    return EncodedProgram(
        program_words(program.instructions),
        _lists(program.queues),
        _lists(program.waits, pairs=True),
        signals,
        torch.bincount(signals.values, minlength=program.counters).int(),
    )


def decode_program(encoded: EncodedProgram, like: Program, check: bool = True) -> Program:
    """The program of these arrays, with the buffers and options of another.

    Operands that do not agree with the buffers are refused, unless `check` is off: for a look at
    a broken program.
    """
    shared: dict[Any, Any] = {}
    found = replace(
        like,
        instructions=tuple(decode(words, shared) for words in encoded.words.tolist()),
        queues=tuple(map(tuple, encoded.queues)),
        waits=tuple(tuple(Wait(*pair) for pair in own) for own in encoded.waits),
        signals=tuple(map(tuple, encoded.signals)),
    )
    if check:
        verify_operands(found, UsageError)
    return found


def program_words(instructions: Sequence[Instruction]) -> torch.Tensor:
    """A row for each instruction; what several share is put into words once."""
    shared: dict[int, list[int]] = {}
    rows = [encode(_encodable(instruction), shared) for instruction in instructions]
    if not rows:
        return torch.empty((0, INSTRUCTIONS.words), dtype=torch.int32)
    found = torch.tensor(rows, dtype=torch.int64)
    strange = ((found < -(2**31)) | (found >= 2**31)).any(1).nonzero()
    if len(strange):
        number = int(strange[0])
        raise UnsupportedError(
            "An operand does not fit in a word",
            where=f"{instructions[number].label} (instruction {number})",
            got=str(max(rows[number], key=abs)),
            expected="operands of 32 bits",
        )
    return found.int()


def _encodable(instruction: Instruction) -> StepInstruction:
    if isinstance(instruction, StepInstruction) and type(instruction) in INSTRUCTIONS.values():
        return instruction
    raise UnsupportedError(
        f"{type(instruction).__name__} has no opcode",
        where=instruction.label,
        expected=f"one of {', '.join(INSTRUCTIONS)}",
    )


def _lists(lists: Sequence[Sequence[Any]], pairs: bool = False) -> Lists:
    offsets = torch.zeros(len(lists) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor([len(own) for own in lists], dtype=torch.int32).cumsum(0)
    values = torch.tensor([value for own in lists for value in own], dtype=torch.int32)
    return Lists(offsets, values.reshape(-1, 2) if pairs else values)
