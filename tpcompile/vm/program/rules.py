"""The rules of operands, declared with each field of an instruction.

A field is `Annotated[int, rule]`. A buffer's rule gives its role, its shape in terms of other
operands, and its dtype. A number's rule gives its range. `operands.py` checks the rules.

A dimension is a product of names: `"heads*width"`. A name is either an operand or free. The first
buffer that uses a free name binds it for the whole instruction. `ranks_of` is the number of ranks
of the program.

A buffer's rule also gives the parts that an instruction reads, writes and joins:
`weight("rows", "width").reads("columns")`. `accesses.py` derives the instruction's regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tpcompile.errors import UnsupportedError
from tpcompile.vm.program.buffer import Role

F32, I32 = torch.float32, torch.int32

PROGRAM_RANKS = "ranks_of"
"""The name of the program's number of ranks in expressions."""

WHOLE = ":"
"""The interval of a whole dimension."""


class Access(NamedTuple):
    """An access to a part of a buffer, with an interval per dimension; missing ones are whole.

    `":"` is the whole dimension, and `":count"` its first elements. Another interval is a range or
    an index, multiplied by numbers and after offsets: `"rows"`, `"heads*width"`, `"first + head"`.
    Names are operands, or attributes of the instruction or of its shared operands.
    """

    mode: str
    """`reads`, `writes` or `joins`."""
    part: tuple[str, ...]
    turn: int = 0
    """Regions are listed by turn, then in the order of operands."""
    unless: tuple[str, int] | None = None
    """A name, and the value with which instructions do not access the buffer."""


class Arrival(NamedTuple):
    """The operands or attributes that give the fields of an instruction's joins; see `Join`."""

    part: str
    whole: str
    arrivals: str
    finish: str


@dataclass(frozen=True)
class BufferRule:
    """A buffer of this role and shape."""

    role: Role
    shape: tuple[str, ...]
    dtype: torch.dtype | str = "float"
    """A dtype, or `float` for any floating-point dtype. Operands with the same letter have the same
    floating-point dtype."""
    storage: tuple[str, ...] | None = None
    optional: bool = False
    each_rank: bool = False
    """Whether each rank has such a buffer, with consecutive numbers; the operand is the first. The
    instruction accesses all of them."""
    accesses: tuple[Access, ...] = ()

    def reads(self, *part: str, turn: int = 0, unless: tuple[str, int] | None = None) -> BufferRule:
        """Return the rule of a buffer of which the instruction reads this part."""
        return self.accessed(Access("reads", part, turn, unless))

    def writes(self, *part: str, turn: int = 0) -> BufferRule:
        """Return the rule of a buffer of which the instruction writes this part."""
        return self.accessed(Access("writes", part, turn))

    def joins(self, *part: str, turn: int = 0) -> BufferRule:
        """Return the rule of a buffer of which this part is complete after the last arrival."""
        return self.accessed(Access("joins", part, turn))

    def accessed(self, access: Access) -> BufferRule:
        """Return the rule with another access."""
        if len(access.part) > len(self.shape):
            raise UnsupportedError(
                f"The part of a {self.role.word} buffer has too many intervals",
                got=", ".join(access.part),
                expected=f"at most {len(self.shape)}, for {', '.join(self.shape)}",
            )
        return replace(self, accesses=(*self.accesses, access))


def weight(*shape: str, dtype: str = "float") -> BufferRule:
    return BufferRule(Role.WEIGHT, shape, dtype)


def scratch(*shape: str, dtype: torch.dtype | str = "float", each_rank: bool = False) -> BufferRule:
    return BufferRule(Role.SCRATCH, shape, dtype, each_rank=each_rank)


def sole(role: Role, *shape: str, dtype: torch.dtype | str = I32) -> BufferRule:
    """Return the rule of the rank's only buffer of a role."""
    return BufferRule(role, shape, dtype)


def cache(heads: str, batch: str = "batch", dtype: str = "float") -> BufferRule:
    """Return the rule of the KV cache, whose storage determines the tokens per block.

    Its rows may be in a format. If they are not, they have this dtype.
    """
    return BufferRule(
        Role.CACHE,
        ("layers", "2", batch, heads, "2"),
        dtype,
        ("layers", "2", f"{batch}*most_blocks*block", heads, "width"),
    )


def maybe(rule: BufferRule) -> BufferRule:
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
    exactly: tuple[str, ...] = ()
    """Expressions, one of which is the number."""
    alike: bool = False
    """Whether all instructions of a program that have the operand have the same number."""
    fits: BufferRule | None = None
    """A rule for the rank's buffer of this role. The buffer is not an operand of this instruction,
    but other instructions use it with the same number."""


@dataclass(frozen=True)
class Real:
    """A finite number of at least `least`."""

    least: float = -torch.inf


@dataclass(frozen=True)
class FormatOf:
    """The format of a weight or of the cache."""

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


Rule = BufferRule | Missing | Number | Real | FormatOf | Within | Chosen

COUNT = Number(1)
ALIKE = Number(1, alike=True)
RANKS = Number(1, exactly=(PROGRAM_RANKS,))
"""The number of ranks in a sum, which is always over all ranks."""
RANK = Number(0, f"{PROGRAM_RANKS} - 1")
LABEL = Number(-1)
"""A layer that is only a label of the instruction; -1 outside the layers."""
