"""The rules of operands, declared with each field of an instruction.

A field is `Annotated[int, rule]`. A buffer's rule gives its role, its shape in terms of other
operands, and its dtype. A number's rule gives its range. `operands.py` checks the rules.

A dimension is a product of names: `"heads*width"`. A name is either an operand or free. The first
buffer that uses a free name binds it for the whole instruction. `ranks_of` is the number of ranks
of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpcompile.vm.program.buffer import Role

F32, I32 = torch.float32, torch.int32

PROGRAM_RANKS = "ranks_of"
"""The name of the program's number of ranks in expressions."""


@dataclass(frozen=True)
class Held:
    """A buffer of this role and shape."""

    role: Role
    shape: tuple[str, ...]
    dtype: torch.dtype | str = "float"
    """A dtype, or `float` for any floating-point dtype. Operands with the same letter have the same
    floating-point dtype."""
    storage: tuple[str, ...] | None = None
    optional: bool = False
    each_rank: bool = False
    """Whether each rank has such a buffer, with consecutive numbers; the operand is the first."""


def weight(*shape: str, dtype: str = "float", optional: bool = False) -> Held:
    return Held(Role.WEIGHT, shape, dtype, optional=optional)


def scratch(*shape: str, dtype: torch.dtype | str = "float", each_rank: bool = False) -> Held:
    return Held(Role.SCRATCH, shape, dtype, each_rank=each_rank)


def sole(role: Role, *shape: str, dtype: torch.dtype | str = I32) -> Held:
    """Return the rule of the rank's only buffer of a role."""
    return Held(role, shape, dtype)


def cache(heads: str, batch: str = "batch", dtype: str = "float") -> Held:
    """Return the rule of the KV cache, whose storage determines the tokens per block."""
    return Held(
        Role.CACHE,
        ("layers", "2", batch, heads, "2"),
        dtype,
        ("layers", "2", f"{batch}*most_blocks*block", heads, "width"),
    )


def maybe(rule: Held) -> Held:
    """Return the same rule for an operand that may be absent."""
    return replace(rule, optional=True)


@dataclass(frozen=True)
class Missing:
    """An absent buffer: this instruction does not use the operand."""


@dataclass(frozen=True)
class Number:
    """An integer from `least` to `most`, an expression such as `"rows - heads*width"`."""

    least: int = 1
    most: str = ""
    optional: bool = False
    exactly: str = ""
    fits: Held | None = None
    """A rule for the rank's buffer of this role. The buffer is not an operand of this instruction,
    but other instructions use it with the same number."""


@dataclass(frozen=True)
class Real:
    """A finite number of at least `least`."""

    least: float = -torch.inf


@dataclass(frozen=True)
class DTypeOf:
    """The dtype of a buffer."""

    operand: str


@dataclass(frozen=True)
class Within:
    """A non-empty range within `0:extent`."""

    extent: str
    least: str = ""
    """The operand of the same instruction that gives the minimum length."""


@dataclass(frozen=True)
class Chosen:
    """A rule for each value of another operand."""

    operand: str
    rules: Mapping[Any, Rule]


Rule = Held | Missing | Number | Real | DTypeOf | Within | Chosen

COUNT = Number(1)
RANKS = Number(1, exactly=PROGRAM_RANKS)
"""The number of ranks in a sum, which is always over all ranks."""
RANK = Number(0, f"{PROGRAM_RANKS} - 1")
LABEL = Number(-1)
"""A layer that is only a label of the instruction; -1 outside the layers."""
