"""Replacement of index variables in terms: each term is rebuilt from its replaced parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tpcompile.ir.values.change import Change
from tpcompile.ir.values.index import (
    BOUND,
    COMPUTED,
    Index,
    Name,
    Variable,
    bounds,
    count_of,
    names_of,
    shifted,
    variable,
)
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.orders import INNERMOST

if TYPE_CHECKING:
    from tpcompile.ir.values.term import Terms


def rebuilt(terms: Terms, term: Term, change: Change, depth: int) -> Term:
    """Return a term after a change of its parts."""
    if term.kind == "cases":
        return _cases(terms, term, change, depth)
    indices = terms.moved(term.indices, change, depth)
    if term.kind == "read":
        return terms.read(term.args[0], indices, term.head, term.dtype)
    if term.kind == "picked":
        pieces = [terms.replace(piece, change, depth + 1) for piece in term.args]
        return _picked(terms, indices[0], term.head, pieces)
    assert term.dtype is not None
    if term.kind == "over":
        head, extents = term.head
        args = [terms.replace(arg, change, depth + len(extents)) for arg in term.args]
        return terms.over(head, extents, args, term.dtype, indices)
    args = [terms.replace(arg, change, depth) for arg in term.args]
    return terms.element(term.head, args, term.dtype)


def _cases(terms: Terms, term: Term, change: Change, depth: int) -> Term:
    (kind, number), extents = term.head
    replacements = change.under(depth)
    place = replacements.get((kind, number))
    if place is None:
        moved = number + (change.shift if kind == BOUND and number >= depth else 0)
        name = (kind, moved)
        if not any(name in names_of(index) for index in replacements.values()):
            pieces = [terms.replace(piece, change, depth) for piece in term.args]
            return terms.cases(name, extents, pieces)
        place = variable(kind, moved, sum(extents))
    pieces = [
        terms.replace(_closed(terms, piece, (kind, number), extent), change, depth + 1)
        for extent, piece in zip(extents, term.args, strict=True)
    ]
    return _picked(terms, place, extents, pieces)


def _closed(terms: Terms, piece: Term, axis: Name, extent: int) -> Term:
    """Return a piece that binds its place along the axis."""
    return terms.replace(piece, terms.change({axis: variable(BOUND, 0, extent)}, 1))


def _picked(terms: Terms, place: Index, extents: tuple[int, ...], pieces: Sequence[Term]) -> Term:
    """Return the piece, or the pieces, that an index reaches; each binds its own place."""
    low, end = bounds(place)
    offset = 0
    for extent, piece in zip(extents, pieces, strict=True):
        if end is not None and offset <= low and end <= offset + extent:
            return terms.replace(piece, terms.change({INNERMOST: shifted(place, -offset)}, -1))
        offset += extent
    split = threshold_split(place, extents)
    if split is None:
        return terms.picked(place, extents, pieces)
    (kind, name, _), sizes = split
    parts, start = [], 0
    for size in sizes:
        part = shifted(variable(kind, name, size), start)
        run = terms.change({(kind, name): part})
        inner = [terms.replace(piece, run, 1) for piece in pieces]
        parts.append(_picked(terms, terms.moved((place,), run, 0)[0], extents, inner))
        start += size
    return terms.cases((kind, name), sizes, parts)


def threshold_split(
    place: Index, extents: tuple[int, ...]
) -> tuple[Variable, tuple[int, ...]] | None:
    """Return a variable, and runs of its values in each of which an index is in one piece.

    The pieces are adjacent. Return None if the index does not depend on one variable alone.
    """
    if not place.digits:
        return None
    high = max(place.digits, key=lambda digit: digit.coefficient)
    lower = Index(0, tuple(digit for digit in place.digits if digit is not high))
    low, end = bounds(lower)
    factor, of, divisor, modulus = high
    if of.kind == COMPUTED or not of.extent or end is None or low < 0:
        return None
    if modulus != count_of(of, divisor) or (end > 1 and end > factor):
        return None
    edges, total = [], 0
    for extent in extents[:-1]:
        total += extent
        steps, odd = divmod(total - place.constant, factor)
        if odd and end > 1:
            return None
        edge = (steps + (odd > 0)) * divisor
        if 0 < edge < of.extent:
            edges.append(edge)
    stops = [0, *sorted(set(edges)), of.extent]
    return of, tuple(b - a for a, b in pairwise(stops))
