"""Names of values within expressions, so that a message is as long as a line of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq
from typing import Any

from tpcompile.ir.values.change import deeper
from tpcompile.ir.values.index import BOUND, COORDINATE, Digit, Index, names_of, numbers_of
from tpcompile.ir.values.node import COMMUTATIVE, Term, binders_of
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import Value, own_indices

Naming = Callable[[Term], tuple[str, tuple[Index, ...]] | None]
"""Function that returns the value of which a term is an element, and at which indices, if any."""

_LIKENESS = 3
"""The depth to which operands are compared before they are paired."""
_MOST_PAIRS = 5000
"""The number of terms that are searched for the indices of a value."""


class Names:
    """The names of the values of a graph; of equal values, that of the first."""

    def __init__(self, terms: Terms, values: Mapping[str, Value]) -> None:
        self._terms, self._forms = terms, _Forms()
        self._values: dict[int, list[tuple[str, Value]]] = {}
        self._names: dict[Term, tuple[str, tuple[Index, ...]] | None] = {}
        for name, value in values.items():
            self._values.setdefault(self._forms.of(value.body), []).append((name, value))

    def __call__(self, term: Term) -> tuple[str, tuple[Index, ...]] | None:
        if term not in self._names:
            self._names[term] = self._find(term)
        return self._names[term]

    def _find(self, term: Term) -> tuple[str, tuple[Index, ...]] | None:
        for name, value in self._values.get(self._forms.of(term), ()):
            places = self._places(value, term)
            if places is not None:
                return name, places
        return None

    def _places(self, value: Value, term: Term) -> tuple[Index, ...] | None:
        """Return the indices at which a value is a term; they are tried before they are returned.

        A correct guess gives the same object, so a wrong one yields no name, never a wrong name.
        """
        coordinates = own_indices(value.shape)
        if value.body is term:
            return coordinates
        bindings = _bindings(value.body, term, coordinates)
        if bindings is None or len(bindings) < len(coordinates):
            return None
        places = {(COORDINATE, n): index for n, index in bindings.items()}
        if self._terms.replace(value.body, self._terms.change(places)) is not term:
            return None
        return tuple(bindings[n] for n in range(len(coordinates)))


class _Forms:
    """Numbers of terms, equal for terms that differ only in their indices."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._by_term: dict[Term, int] = {}

    def of(self, term: Term) -> int:
        stack = [term]  # terms are as deep as a model
        while stack:
            current = stack[-1]
            left = [arg for arg in current.args if arg not in self._by_term]
            if current in self._by_term or not left:
                stack.pop()
                if current not in self._by_term:
                    self._by_term[current] = self._number(current)
            else:
                stack += left
        return self._by_term[term]

    def _number(self, term: Term) -> int:
        parts = [self._by_term[arg] for arg in term.args]
        if term.head in COMMUTATIVE:
            parts.sort()
        key = (term.kind, _head(term), term.dtype, *parts)
        return self._numbers.setdefault(key, len(self._numbers))


def _head(term: Term) -> Any:
    return term.head[1] if term.kind == "cases" else term.head


def _likeness(term: Term, depth: int) -> Any:
    """Return a key that is the same for terms that are elements of the same value."""
    head = _head(term)
    if not depth or term.kind in ("tensor", "input", "call"):
        return term.kind, head, term.dtype
    parts = [_likeness(arg, depth - 1) for arg in term.args]
    if term.head in COMMUTATIVE:
        parts.sort(key=hash)
    return term.kind, head, term.dtype, tuple(parts)


def _bindings(body: Term, term: Term, coordinates: tuple[Index, ...]) -> dict[int, Index] | None:
    """Return an index for each coordinate of a body, at which the body may equal a term."""
    bindings: dict[int, Index] = {}
    pairs, visited = [(body, term, 0)], {(body, term)}
    while pairs and len(bindings) < len(coordinates) and len(visited) < _MOST_PAIRS:
        left, right, depth = pairs.pop()
        if left is right:
            for kind, n in left.free:
                if kind == COORDINATE:
                    bindings.setdefault(n, coordinates[n])
            continue
        if _form(left) != _form(right) or left.kind in ("tensor", "input", "call", "whole"):
            return None
        inner = depth + binders_of(left)
        inner_pairs = [(*pair, inner) for pair in paired(left, right)]
        for index, other in zip(left.indices, right.indices, strict=True):
            _bind(bindings, index, other, depth)
            numbers = zip(numbers_of(index), numbers_of(other), strict=False)
            inner_pairs += [(*pair, depth) for pair in numbers]
        pairs += [pair for pair in inner_pairs if pair[:2] not in visited]
        visited.update(pair[:2] for pair in inner_pairs)
    return bindings


def _form(term: Term) -> Any:
    return term.kind, term.dtype, len(term.args), len(term.indices)


def paired(left: Term, right: Term) -> list[tuple[Term, Term]]:
    """Pair the operands of two terms, also if those of a sum or product are in another order."""
    order = right.args
    if left.head in COMMUTATIVE:
        for depth in range(_LIKENESS, -1, -1):
            lefts, rights = ([_likeness(arg, depth) for arg in term.args] for term in (left, right))
            straight, crossed = (sum(map(eq, lefts, keys)) for keys in (rights, reversed(rights)))
            if straight != crossed:
                order = order if straight > crossed else order[::-1]
                break
    return list(zip(left.args, order, strict=True))


def _bind(bindings: dict[int, Index], index: Index, other: Index, depth: int) -> None:
    """Add the coordinates of an index to bindings, given the index that stands in its place."""
    for digit in index.digits:
        if digit.variable.kind != COORDINATE or digit != _whole(digit):
            continue
        if index == Index(0, (digit,)):
            replacement = other
        else:
            same = [match for match in other.digits if match.coefficient == digit.coefficient]
            if len(same) != 1:
                continue
            extra = other.constant - index.constant if digit.coefficient == 1 else 0
            replacement = Index(extra, (same[0]._replace(coefficient=1),))
        if not any(kind == BOUND and place < depth for kind, place in names_of(replacement)):
            bindings.setdefault(digit.variable.name, deeper(replacement, -depth))


def _whole(digit: Digit) -> Digit:
    """Return the digit that is a multiple of the variable itself."""
    return Digit(digit.coefficient, digit.variable, 1, digit.variable.extent)
