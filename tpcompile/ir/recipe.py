"""Recipes: expressions that build a rank's parameter from checkpoint tensors.

A recipe is data. Nothing is read until a rank evaluates its own recipe. `pieces.py` computes in
advance which elements the evaluation reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tpcompile.ir.format import Component, Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.roles import Run

_T = TypeVar("_T")


@dataclass(frozen=True)
class Tensor:
    """A whole weight of the checkpoint: one tensor, or those of the components of its format."""

    name: str
    shape: tuple[int, ...]
    format: Format | None = None
    """None if the checkpoint stores the values, in any dtype."""


@dataclass(frozen=True)
class Slice:
    """Indices `start` to `stop` of one dimension."""

    source: Recipe
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Concat:
    """Recipes concatenated along one dimension."""

    sources: tuple[Recipe, ...]
    dim: int


@dataclass(frozen=True)
class Permute:
    """Dimension `dim`, viewed as `view`, with the axes of that view permuted to `order`."""

    source: Recipe
    dim: int
    view: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """A recipe padded with zeros at the end of one dimension."""

    source: Recipe
    dim: int
    rows: int


Recipe = Tensor | Slice | Concat | Permute | Pad


def shape_of(recipe: Recipe) -> tuple[int, ...]:
    match recipe:
        case Tensor(shape=shape):
            return shape
        case Slice(source, dim, start, stop):
            return with_item(shape_of(source), dim, stop - start)
        case Concat(sources, dim):
            shapes = [shape_of(source) for source in sources]
            return with_item(shapes[0], dim, sum(shape[dim] for shape in shapes))
        case Permute(source=source):
            return shape_of(source)
        case Pad(source, dim, rows):
            shape = shape_of(source)
            return with_item(shape, dim, shape[dim] + rows)


def stored_tensors(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Component | None]]:
    """Yield the tensors in which a checkpoint stores weights.

    Components are those of formats; a weight without one is stored in any floating-point dtype.
    """
    for tensor in tensors:
        if tensor.format is None:
            yield tensor, None
            continue
        for part in tensor.format.components:
            stored = component_of(tensor, part)
            assert isinstance(stored, Tensor)
            yield stored, part


def tensors_of(recipe: Recipe) -> Iterator[Tensor]:
    """Yield the checkpoint tensors of a recipe, from left to right."""
    match recipe:
        case Tensor():
            yield recipe
        case Concat(sources=sources):
            for source in sources:
                yield from tensors_of(source)
        case Slice(source=source) | Permute(source=source) | Pad(source=source):
            yield from tensors_of(source)


def component_of(recipe: Recipe, part: Component) -> Recipe:
    """Return the recipe of one component of a weight, given the recipe of the weight.

    Columns are the last dimension, and the other dimensions of a component are those of the weight.
    Its columns are those of the weight's columns, which must be one run.
    """
    last = len(shape_of(recipe)) - 1
    match recipe:
        case Tensor(name, shape):
            *rows, columns = shape
            return Tensor(name + part.suffix, (*rows, part.span(0, columns)[1]))
        case Slice(source, dim, start, stop) if dim == last:
            columns = first_column(source)
            first, end = part.span(columns + start, columns + stop)
            skipped = part.span(columns, columns + 1)[0]
            return take(component_of(source, part), dim, first - skipped, end - skipped)
        case Slice(source, dim, start, stop):
            return take(component_of(source, part), dim, start, stop)
        case Concat(sources, dim) if dim != last:
            return Concat(tuple(component_of(source, part) for source in sources), dim)
        case Permute(source, dim, view, order) if dim != last:
            return Permute(component_of(source, part), dim, view, order)
        case Pad(source, dim, rows) if dim != last:
            return Pad(component_of(source, part), dim, rows)
    raise ValueError(f"the columns of {describe(recipe)} are not one run")


def first_column(recipe: Recipe) -> int:
    """Return the column of the whole weight with which the rows of a recipe begin."""
    last = len(shape_of(recipe)) - 1
    match recipe:
        case Tensor():
            return 0
        case Slice(source, dim, start, _) if dim == last:
            return first_column(source) + start
        case Slice(source):
            return first_column(source)
        case Concat(sources, dim) if dim != last:
            first, *conflicting = {first_column(source) for source in sources}
            if not conflicting:
                return first
        case Permute(source, dim) | Pad(source, dim) if dim != last:
            return first_column(source)
    raise ValueError(f"the columns of {describe(recipe)} are not one run")


def take(recipe: Recipe, dim: int, start: int, stop: int) -> Recipe:
    """Return a slice of a recipe, pushed down towards the tensors as far as possible."""
    if (start, stop) == (0, shape_of(recipe)[dim]):
        return recipe
    match recipe:
        case Slice(source, inner, offset, _) if inner == dim:
            return take(source, dim, offset + start, offset + stop)
        case Slice(source, inner, low, high):
            return Slice(take(source, dim, start, stop), inner, low, high)
        case Concat(sources, inner) if inner == dim:
            return _take_concat(sources, dim, start, stop)
        case Concat(sources, inner):
            return Concat(tuple(take(source, dim, start, stop) for source in sources), inner)
        case Permute(source, inner, view, order) if inner != dim:
            return Permute(take(source, dim, start, stop), inner, view, order)
        case Permute(source, _, view, order) if _whole_units(view, order, start, stop):
            units = (stop - start) // math.prod(view[1:])
            return Permute(take(source, dim, start, stop), dim, (units, *view[1:]), order)
        case _:
            return Slice(recipe, dim, start, stop)


def _whole_units(view: tuple[int, ...], order: tuple[int, ...], start: int, stop: int) -> bool:
    """Return whether a slice consists of whole units of the outermost axis, which stays first."""
    unit = math.prod(view[1:])
    return order[0] == 0 and start % unit == stop % unit == 0


def shard(recipe: Recipe, dim: int, intervals: Iterable[Interval]) -> Recipe:
    """Return the recipe of a rank that holds these intervals of one dimension."""
    return concat([take(recipe, dim, start, stop) for start, stop in intervals], dim)


def head_parts(source: Recipe, run: Run) -> Recipe:
    """Return the recipe of a part of every head of a weight or a bias: see `Run`."""
    starts = range(run.first, shape_of(source)[0], run.stride)
    return concat([take(source, 0, start, start + run.width) for start in starts], 0)


def concat(sources: list[Recipe], dim: int) -> Recipe:
    return sources[0] if len(sources) == 1 else Concat(tuple(sources), dim)


def describe(recipe: Recipe) -> str:
    """Format a recipe as text, e.g. `model.q.weight[0:128] ++ model.k.weight`."""
    match recipe:
        case Tensor(name=name):
            return name
        case Slice(source, dim, start, stop):
            inner = describe(source)
            inner = f"({inner})" if isinstance(source, Concat) else inner
            return f"{inner}[{':, ' * dim}{start}:{stop}]"
        case Concat(sources, dim):
            sign = " ++ " if dim == 0 else f" ++(dim {dim}) "
            return sign.join(describe(source) for source in sources)
        case Permute(source, dim, view, order):
            return f"permute({describe(source)}, dim {dim} as {view} to {order})"
        case Pad(source, dim, rows):
            return f"pad({describe(source)}, dim {dim} by {rows})"


def with_item(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    """Return the values with another one at `index`."""
    return (*values[:index], value, *values[index + 1 :])


def _take_concat(sources: tuple[Recipe, ...], dim: int, start: int, stop: int) -> Recipe:
    parts = []
    offset = 0
    for source in sources:
        extent = shape_of(source)[dim]
        low, high = max(start - offset, 0), min(stop - offset, extent)
        if low < high:
            parts.append(take(source, dim, low, high))
        offset += extent
    return concat(parts, dim)
