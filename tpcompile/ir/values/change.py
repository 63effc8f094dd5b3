"""Replacements of index variables, in indices and in expressions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from tpcompile.ir.values.index import (
    BOUND,
    COMPUTED,
    Digit,
    Index,
    Inexact,
    Name,
    Variable,
    constant,
    count_of,
    divided,
    names_of,
    plus,
    times,
    variable,
)
from tpcompile.ir.values.node import Term


class Change:
    """A replacement of variables by indices, with the terms that it has been applied to.

    Other bound variables are renamed by `shift`, where a binder is added or removed.
    """

    __slots__ = ("_deep", "_done", "_keys", "_local", "_moved", "replacements", "shift")

    def __init__(self, indices: dict[Name, Index], shift: int = 0) -> None:
        self.replacements, self.shift = indices, shift
        names = (*indices, *(name for index in indices.values() for name in names_of(index)))
        self._local = bool(shift) or any(kind == BOUND for kind, _ in names)
        self._keys = None if any(kind == BOUND for kind, _ in indices) else frozenset(indices)
        self._done: dict[int, dict[Term, Term]] = defaultdict(dict)
        self._moved: dict[int, dict[tuple[Index, ...], tuple[Index, ...]]] = defaultdict(dict)
        self._deep: dict[int, dict[Name, Index]] = {0: indices}

    def under(self, depth: int) -> dict[Name, Index]:
        """Return the replacement within this number of further binders."""
        if not self._local:
            return self.replacements
        if depth not in self._deep:
            self._deep[depth] = {
                (kind, name + depth if kind == BOUND else name): deeper(index, depth)
                for (kind, name), index in self.replacements.items()
            }
        return self._deep[depth]

    def done(self, depth: int) -> dict[Term, Term]:
        """Return the replaced terms by term, per depth if the replacement depends on it."""
        return self._done[depth if self._local else 0]

    def moved(self, depth: int) -> dict[tuple[Index, ...], tuple[Index, ...]]:
        """Return the replaced indices by index, per depth if the replacement depends on it."""
        return self._moved[depth if self._local else 0]

    def touches(self, term: Term, depth: int) -> bool:
        """Return whether the replacement can change a term."""
        free = term.free
        if not free:
            return False
        keys = self._keys if self._keys is not None else self.under(depth)
        if not free.isdisjoint(keys):
            return True
        return bool(self.shift) and any(k == BOUND and n >= depth for k, n in free)


def replaced(
    index: Index,
    replacements: Mapping[Name, Index],
    compute: Callable[[Any], Any],
    depth: int = 0,
    shift: int = 0,
) -> Index:
    """Replace variables of an index; `compute` does so in the terms of computed ones.

    Bound variables from `depth` on that are not replaced are renamed by `shift`.
    """
    if not shift and not any(map(_is_replaced, index.digits, repeat(replacements))):
        return index
    parts = [constant(index.constant)]
    for factor, of, divisor, modulus in index.digits:
        kind, name, extent = of
        if kind != COMPUTED:
            new = replacements.get((kind, name))
            if new is None and shift and kind == BOUND and name >= depth:
                of = Variable(kind, name + shift, extent)
        elif isinstance(name, Inexact):
            inner = replaced(name.dividend, replacements, compute, depth, shift)
            new = divided(inner, name.divisor)[name.remainder]
        else:
            new = variable(COMPUTED, compute(name), extent)
        if new is None:
            parts.append(Index(0, (Digit(factor, of, divisor, modulus),)))
            continue
        if divisor != 1:
            new = divided(new, divisor)[0]
        if modulus and modulus != count_of(of, divisor):  # the new index is within the extent
            new = divided(new, modulus)[1]
        parts.append(times(new, factor))
    return plus(*parts)


def _is_replaced(digit: Digit, replacements: Mapping[Name, Index]) -> bool:
    variable = digit.variable
    return variable[0] == COMPUTED or variable[:2] in replacements


def deeper(index: Index, depth: int) -> Index:
    """Return an index within this number of further binders."""
    if not depth or not any(kind == BOUND for kind, _ in names_of(index)):
        return index
    return replaced(index, {}, lambda term: term, 0, depth)
