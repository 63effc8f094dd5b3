"""The nodes of expressions, and properties of single nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tpcompile.ir.values.index import BOUND, Index, Name, names_of, numbers_of

Dim = int | str
CAST = "to"
COMMUTATIVE = ("add", "mul")
_NOTHING: frozenset[Name] = frozenset()
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


class Term:
    """A node of an expression; `head` says which op or tensor, `indices` where it is read."""

    __slots__ = ("args", "dtype", "free", "head", "indices", "kind", "number")

    def __init__(
        self,
        number: int,
        kind: str,
        head: Any,
        args: tuple[Term, ...],
        indices: tuple[Index, ...],
        dtype: torch.dtype | None,
        free: frozenset[Name],
    ) -> None:
        self.number, self.kind, self.head, self.args = number, kind, head, args
        self.indices, self.dtype, self.free = indices, dtype, free

    def __repr__(self) -> str:
        return f"<term {self.number}: {self.kind} {self.head}>"


def is_exact(narrow: torch.dtype | None, wide: torch.dtype | None) -> bool:
    """Return whether a cast rounds nothing."""
    return narrow == wide or (narrow is not None and wide in _WIDER.get(narrow, ()))


def unwidened(term: Term, dtype: torch.dtype) -> Term:
    """Drop a cast that an op which computes in `dtype` makes itself, without rounding."""
    if term.kind == "element" and term.head == CAST and is_exact(term.dtype, dtype):
        inner = term.args[0]
        return inner if is_exact(inner.dtype, term.dtype) else term
    return term


def binders_of(term: Term) -> int:
    """Return the number of variables that a term binds in its operands."""
    return len(term.head[1]) if term.kind == "over" else int(term.kind == "picked")


def parts_of(term: Term, depth: int) -> Iterator[tuple[Term, int]]:
    """Yield the terms that a change of a term changes first, with their depths."""
    if term.kind == "cases":
        return  # its pieces are first given another variable
    within = depth + binders_of(term)
    for arg in term.args:
        yield arg, within
    for index in term.indices:
        for number in numbers_of(index):
            yield number, depth


def free_of(
    kind: str, head: Any, args: tuple[Term, ...], indices: tuple[Index, ...]
) -> frozenset[Name]:
    """Return the variables of a term that are not bound within it."""
    if kind in ("whole", "call"):
        return _NOTHING
    binders = len(head[1]) if kind == "over" else int(kind == "picked")
    inner = {arg.free for arg in args}
    if binders:
        inner = {
            frozenset(
                (k, n - binders if k == BOUND else n)
                for k, n in names
                if k != BOUND or n >= binders
            )
            for names in inner
        }
    free_names = [name for index in indices for name in names_of(index)]
    if kind == "cases":
        free_names.append(head[0])
    if not free_names and len(inner) == 1:
        return inner.pop()
    return _NOTHING.union(free_names, *inner)
