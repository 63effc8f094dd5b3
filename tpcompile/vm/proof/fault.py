"""Faults, the verifier's findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.vm.program import Box, Program
from tpcompile.vm.program.region import box_text


@dataclass(frozen=True)
class Fault:
    """A violated rule, with a description of how the program violates it."""

    rule: str
    message: str
    count: int = 1
    """The number of faults that this one stands for."""


_MOST_PIECES = 3
"""The maximum number of parts of a buffer that a message lists."""


def cited(program: Program, number: int) -> str:
    """Format an instruction for a message."""
    return f"{program.instructions[number].label} (instruction {number})"


def listed(name: str, pieces: Sequence[Box]) -> str:
    """Format parts of a buffer for a message."""
    more = len(pieces) - _MOST_PIECES
    text = ", ".join(name + box_text(box) for box in pieces[:_MOST_PIECES])
    return f"{text} and {more} more parts" if more > 0 else text
