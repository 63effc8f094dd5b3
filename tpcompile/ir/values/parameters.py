"""Parameters as values: their recipes, read in the global view."""

from __future__ import annotations

import torch

from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, Tensor, shape_of
from tpcompile.ir.values.index import divided, plus, shifted, times
from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import (
    Value,
    coordinates,
    joined,
    reshaped,
    sliced,
    viewed,
)


def parameter_value(terms: Terms, recipe: Recipe, dtype: torch.dtype) -> Value:
    """Return the value of a recipe, in the dtype in which the graph computes with it."""
    match recipe:
        case Tensor(name, shape, stored):
            source = terms.source("tensor", (name, shape, stored), dtype)
            indices = coordinates(shape)
            return Value(shape, dtype, terms.read(source, tuple(indices)))
        case Slice(source, dim, start, stop):
            return sliced(terms, parameter_value(terms, source, dtype), dim, start, stop - start)
        case Concat(sources, dim):
            strided = _strided(sources, dim)
            if strided is not None:
                return _runs(terms, recipe, strided, dtype)
            parts = [parameter_value(terms, source, dtype) for source in sources]
            return joined(terms, parts, dim)
        case Permute(source, dim, view, order):
            return _permuted(terms, parameter_value(terms, source, dtype), dim, view, order)
        case Pad(source, dim, rows):
            whole = parameter_value(terms, source, dtype)
            shape_of_zeros = (*whole.shape[:dim], rows, *whole.shape[dim + 1 :])
            zeros = Value(shape_of_zeros, dtype, terms.zero(dtype))
            return joined(terms, [whole, zeros], dim)


def _strided(sources: tuple[Recipe, ...], dim: int) -> int | None:
    """Return the distance of slices of equal size at equal distances, or None for others."""
    first, *later = sources
    if not later or not isinstance(first, Slice):
        return None
    second = later[0]
    step = second.start - first.start if isinstance(second, Slice) else 0
    for place, source in enumerate(sources):
        if not isinstance(source, Slice) or source.dim != dim or source.source != first.source:
            return None
        start = first.start + place * step
        if (source.start, source.stop) != (start, start + first.stop - first.start):
            return None
    return step if step > 0 else None


def _runs(terms: Terms, recipe: Concat, step: int, dtype: torch.dtype) -> Value:
    first, dim = recipe.sources[0], recipe.dim
    assert isinstance(first, Slice)
    shape = shape_of(recipe)
    indices = coordinates(shape)
    run, offset = divided(indices[dim], first.stop - first.start)
    indices[dim] = shifted(plus(times(run, step), offset), first.start)
    return viewed(terms, parameter_value(terms, first.source, dtype), shape, indices)


def _permuted(
    terms: Terms, value: Value, dim: int, view: tuple[int, ...], order: tuple[int, ...]
) -> Value:
    """Return a value with the axes of a view of one of its dimensions permuted."""
    shape = value.shape
    apart = reshaped(terms, value, (*shape[:dim], *view, *shape[dim + 1 :]))
    places = [*range(dim), *(dim + axis for axis in order), *range(dim + len(view), apart.dims)]
    moved = tuple(apart.shape[place] for place in places)
    indices = coordinates(moved)
    whole = viewed(terms, apart, moved, [indices[places.index(a)] for a in range(apart.dims)])
    return reshaped(terms, whole, shape)
