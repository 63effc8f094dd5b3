"""Patterns of calls, as data: passes match them with nodes, and a composite op has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """Any node, bound to a name; a repeated name must match the same node."""

    name: str
    optional: bool = False
    """Whether it may be absent; it is then bound to None."""


@dataclass(frozen=True)
class Number:
    """A numeric argument, bound to a name; a repeated name must match the same number."""

    name: str
    unequal: str = "the same argument has two values"
    """The reason for refusing another number."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of `target` whose arguments match `args`, in either order if `commutes` is set.

    A call that occurs twice in a pattern matches one node.
    """

    target: Any
    args: tuple[Any, ...]
    commutes: bool = False


@dataclass(frozen=True)
class Maybe:
    """An optional call, such as a cast: `target` of a match of `inner`, or `inner` alone."""

    target: Any
    inner: Any


@dataclass(frozen=True)
class Optional:
    """A call or, without its optional operands, its first argument alone."""

    call: Call


class Unknown:
    """An argument that depends on types, such as a width; it matches anything."""

    def __getitem__(self, index: int) -> Unknown:
        return self

    def __mul__(self, other: Any) -> Unknown:
        return self

    __rmul__ = __floordiv__ = __sub__ = __mul__


UNKNOWN = Unknown()
