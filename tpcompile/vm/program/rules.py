"""What an operand must be: the rules that stand beside each field of an instruction.

A field is `Annotated[int, rule]`. A buffer's rule gives its kind, its shape in terms of other
operands, and its dtype; a number's rule gives its range. `operands.py` checks them.

A dimension is a product of names: `"heads*width"`. A name is an operand, or else it is free: the
first buffer that mentions it gives it a value, which holds for the whole instruction. `ranks_of`
is the number of ranks of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

F32, I32 = torch.float32, torch.int32

PROGRAM_RANKS = "ranks_of"
"""The name, in expressions, of the program's number of ranks."""


@dataclass(frozen=True)
class Held:
    """A buffer of this kind and shape.

    Executors find a state, an input or a cache by its name, so there the name is the role.
    """

    kind: str
    shape: tuple[str, ...]
    role: str = ""
    dtype: torch.dtype | str = "float"
    """One dtype; or `float`, any floating point; or a letter, the same for all that have it."""
    storage: tuple[str, ...] | None = None
    optional: bool = False
    each_rank: bool = False
    """One for each rank, one after the other; the operand is the first."""


def weight(*shape: str, dtype: str = "float", optional: bool = False) -> Held:
    return Held("weight", shape, dtype=dtype, optional=optional)


def scratch(*shape: str, dtype: torch.dtype | str = "float", each_rank: bool = False) -> Held:
    return Held("scratch", shape, dtype=dtype, each_rank=each_rank)


def state(role: str, *shape: str) -> Held:
    return Held("state", shape, role, I32)


def given(role: str, *shape: str, dtype: torch.dtype | str = I32) -> Held:
    """An input."""
    return Held("input", shape, role, dtype)


def cache(heads: str, batch: str = "batch", dtype: str = "float") -> Held:
    """The KV cache, whose storage fixes the tokens of a block."""
    return Held(
        "cache",
        ("layers", "2", batch, heads, "2"),
        "cache",
        dtype,
        ("layers", "2", f"{batch}*most_blocks*block", heads, "width"),
    )


def maybe(rule: Held) -> Held:
    """The same for an operand that may be missing."""
    return replace(rule, optional=True)


@dataclass(frozen=True)
class Missing:
    """No buffer: this instruction does not use the operand."""


@dataclass(frozen=True)
class Number:
    """A whole number from `least` to `most`, which is an expression as `"rows - heads*width"`."""

    least: int = 1
    most: str = ""
    multiple: str = ""
    """The operand that it must be a multiple of."""
    optional: bool = False
    exactly: str = ""
    fits: Held | None = None
    """What the rank's buffer of this role must be, though it is no operand of the instruction:
    others use it with the same number."""


@dataclass(frozen=True)
class Fraction:
    """A finite number, and no less than `least`."""

    least: float = -torch.inf


@dataclass(frozen=True)
class ItemOf:
    """The bytes of an element of a buffer."""

    operand: str


@dataclass(frozen=True)
class Within:
    """A range that is not empty and ends at `extent` or before."""

    extent: str
    least: str = ""
    """The operand beside it that says how long it is at least."""


@dataclass(frozen=True)
class Chosen:
    """Another rule for each value of an operand."""

    operand: str
    rules: Mapping[Any, Rule]


Rule = Held | Missing | Number | Fraction | ItemOf | Within | Chosen

COUNT = Number(1)
RANKS = Number(1, exactly=PROGRAM_RANKS)
"""A sum is of all ranks."""
RANK = Number(0, f"{PROGRAM_RANKS} - 1")
LABEL = Number(-1)
"""A layer that only labels an instruction; -1 outside of the layers."""
