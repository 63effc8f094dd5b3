"""Faults, the verifier's findings."""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.vm.program import Program


@dataclass(frozen=True)
class Fault:
    """A violated rule, with a description of how the program violates it."""

    rule: str
    message: str
    count: int = 1
    """The number of faults that this one stands for."""


def cited(program: Program, number: int) -> str:
    """Format an instruction for a message."""
    return f"{program.instructions[number].label} (instruction {number})"
