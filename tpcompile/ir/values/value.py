"""Values: a shape, a dtype, and the term of one element; operations that change indices only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from tpcompile.ir.values.index import (
    BOUND,
    COMPUTED,
    COORDINATE,
    ZERO,
    Index,
    divided,
    plus,
    shifted,
    times,
    variable,
)
from tpcompile.ir.values.node import Dim, Term
from tpcompile.ir.values.term import Terms


class OpaqueError(Exception):
    """The refusal of a rule, which has no expression for these operands."""


@dataclass(frozen=True)
class Value:
    """A value in the global view: the union of the ranks' parts, or the sum of their terms.

    Axes with one element have no coordinate. So a batch of one is its only row.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    body: Term
    interleaved: bool = False
    """Whether its heads are interleaved, which attention reads in the model's order."""

    @property
    def dims(self) -> int:
        return len(self.shape)


def extent_of(extent: Dim) -> int:
    """Return an extent as a number, 0 for a symbolic one."""
    return extent if isinstance(extent, int) else 0


def coordinates(shape: Sequence[Dim]) -> list[Index]:
    """Return the index of each axis."""
    return list(_coordinates(tuple(shape)))


@lru_cache(maxsize=1024)
def _coordinates(shape: tuple[Dim, ...]) -> tuple[Index, ...]:
    indices, place = [], 0
    for extent in shape:
        indices.append(variable(COORDINATE, place, extent_of(extent)))
        place += extent != 1
    return tuple(indices)


def own_indices(shape: Sequence[Dim]) -> tuple[Index, ...]:
    """Return the index of each axis that has a coordinate."""
    indices = coordinates(shape)
    return tuple(index for index, extent in zip(indices, shape, strict=True) if extent != 1)


def element_at(terms: Terms, value: Value, indices: Sequence[Index]) -> Term:
    """Return the element of a value at an index per axis."""
    if not value.body.free:
        return value.body
    change = terms.changes_at.get((value.shape, tuple(indices)))
    if change is None:
        pairs = zip(indices, coordinates(value.shape), value.shape, strict=True)
        axes = [(new, old) for new, old, extent in pairs if extent != 1]
        replacements = {(COORDINATE, n): new for n, (new, old) in enumerate(axes) if new != old}
        change = terms.changes_at[value.shape, tuple(indices)] = terms.change(replacements)
    return terms.replace(value.body, change)


def viewed(terms: Terms, value: Value, shape: Sequence[Dim], indices: Sequence[Index]) -> Value:
    """Return the value of this shape whose elements are those at an index per axis."""
    return Value(tuple(shape), value.dtype, element_at(terms, value, indices), value.interleaved)


def last_bound(terms: Terms, value: Value) -> Term:
    """Return an element of a value whose last axis is bound by an op."""
    leading = coordinates(value.shape)[:-1]
    return element_at(terms, value, [*leading, variable(BOUND, 0, extent_of(value.shape[-1]))])


def broadcast_to(terms: Terms, value: Value, shape: Sequence[Dim]) -> Term:
    """Return an element of a value that is broadcast to a shape."""
    missing = len(shape) - value.dims
    indices = coordinates(shape)[missing:]
    return element_at(
        terms,
        value,
        [ZERO if size == 1 else index for size, index in zip(value.shape, indices, strict=True)],
    )


def reshaped(terms: Terms, value: Value, shape: Sequence[Dim]) -> Value:
    """Return the same elements, in row-major order, in another shape."""
    if tuple(shape) == value.shape:
        return value
    new = coordinates(shape)
    indices = [ZERO] * value.dims
    for old_axes, new_axes in _groups(value.shape, tuple(shape)):
        flat = ZERO
        for axis in new_axes:
            if flat != ZERO:
                flat = times(flat, _known(shape[axis]))
            flat = plus(flat, new[axis])
        for axis in reversed(old_axes[1:]):
            flat, indices[axis] = divided(flat, _known(value.shape[axis]))
        for axis in old_axes[:1]:
            indices[axis] = flat
    return viewed(terms, value, shape, indices)


def _known(extent: Dim) -> int:
    if isinstance(extent, str):
        raise OpaqueError(f"the extent {extent} is not known")
    return extent


def _groups(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> list[tuple[list[int], list[int]]]:
    """Pair runs of axes of two shapes that have the same elements, as short as possible.

    Axes with one element are left out.
    """
    left, right = (
        [axis for axis, extent in enumerate(shape) if extent != 1] for shape in (old, new)
    )
    groups = []
    while left or right:
        olds, news = left[:1], right[:1]
        del left[:1], right[:1]
        while (a := product(old, olds)) != (b := product(new, news)):
            if right and (not left or _smaller(b, a)):
                news.append(right.pop(0))
            elif left:
                olds.append(left.pop(0))
            else:
                raise OpaqueError(f"{old} has other elements than {new}")
        groups.append((olds, news))
    return groups


def product(shape: Sequence[Dim], axes: Sequence[int]) -> tuple[int, tuple[str, ...]]:
    total, symbols = 1, []
    for axis in axes:
        extent = shape[axis]
        if isinstance(extent, str):
            factor, _, symbol = extent.rpartition("*")
            total *= int(factor or 1)
            symbols.append(symbol)
        else:
            total *= extent
    return total, tuple(sorted(symbols))


def _smaller(left: tuple[int, tuple[str, ...]], right: tuple[int, tuple[str, ...]]) -> bool:
    return (len(left[1]), left[0]) < (len(right[1]), right[0])


def transposed(terms: Terms, value: Value, first: int, second: int) -> Value:
    order = list(range(value.dims))
    order[first], order[second] = order[second], order[first]
    shape = tuple(value.shape[axis] for axis in order)
    indices = coordinates(shape)
    return viewed(terms, value, shape, [indices[order.index(axis)] for axis in range(value.dims)])


def sliced(terms: Terms, value: Value, dim: int, start: int, length: int, step: int = 1) -> Value:
    """Return every `step`-th of the elements of an axis, from `start` on."""
    dim %= value.dims
    shape = (*value.shape[:dim], length, *value.shape[dim + 1 :])
    indices = coordinates(shape)
    indices[dim] = shifted(times(indices[dim], step), start)
    return viewed(terms, value, shape, indices)


def expanded(terms: Terms, value: Value, shape: Sequence[Dim]) -> Value:
    return Value(tuple(shape), value.dtype, broadcast_to(terms, value, shape), value.interleaved)


def selected(terms: Terms, value: Value, dim: int, rows: Value) -> Value:
    """Return the rows of an axis that a value of numbers chooses."""
    dim %= value.dims
    shape = (*value.shape[:dim], *rows.shape, *value.shape[dim + 1 :])
    indices = coordinates(shape)
    chosen = element_at(terms, rows, indices[dim : dim + rows.dims])
    indices[dim : dim + rows.dims] = [computed(chosen, value.shape[dim])]
    return viewed(terms, value, shape, indices)


def computed(number: Term, extent: Dim) -> Index:
    """Return an element of a value of integers as an index."""
    return variable(COMPUTED, number, extent_of(extent))


def repeated(terms: Terms, value: Value, times_: int, dim: int) -> Value:
    """Return a value with each element of an axis repeated."""
    dim %= value.dims
    extent = extent_of(value.shape[dim]) * times_
    shape = (*value.shape[:dim], extent, *value.shape[dim + 1 :])
    indices = coordinates(shape)
    indices[dim] = divided(indices[dim], times_)[0]
    return viewed(terms, value, shape, indices)


def joined(terms: Terms, values: Sequence[Value], dim: int) -> Value:
    """Return values concatenated along an axis."""
    dim %= values[0].dims
    extents = [extent_of(value.shape[dim]) for value in values]
    shape = list(values[0].shape)
    shape[dim] = sum(extents)
    whole = [value for value in values if extent_of(value.shape[dim])]
    if len(whole) == 1:
        return whole[0]
    place = sum(extent != 1 for extent in shape[:dim])
    pieces = []
    for value, extent in zip(values, extents, strict=True):
        indices = coordinates(shape)
        indices[dim] = variable(COORDINATE, place, extent)
        pieces.append(element_at(terms, value, indices))
    body = terms.cases((COORDINATE, place), extents, pieces)
    return Value(tuple(shape), values[0].dtype, body)


def stacked(terms: Terms, values: Sequence[Value], dim: int) -> Value:
    """Return values side by side along a new axis."""
    dim %= values[0].dims + 1
    shape = values[0].shape
    parts = [reshaped(terms, value, (*shape[:dim], 1, *shape[dim:])) for value in values]
    return joined(terms, parts, dim)
