"""Random layouts, placements and recipes for property tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tpcompile.ir.layout import FusedLayout, Interval, Layout
from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, Tensor, shape_of

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
"""Settings with a fixed seed per test, so that runs are reproducible."""

RANKS = st.integers(1, 4)


def intervals_of(units: Iterable[int]) -> tuple[Interval, ...]:
    """Return sorted intervals, with adjacent units merged."""
    intervals: list[Interval] = []
    for unit in sorted(units):
        if intervals and intervals[-1][1] == unit:
            intervals[-1] = (intervals[-1][0], unit + 1)
        else:
            intervals.append((unit, unit + 1))
    return tuple(intervals)


@st.composite
def layouts(
    draw: st.DrawFn,
    ranks: int,
    *,
    units: int | None = None,
    grain: int | None = None,
    overlapping: bool = False,
    axis: str = "axis",
) -> Layout:
    """Draw an uneven, scattered, optionally overlapping layout with a unit on each rank."""
    units = draw(st.integers(ranks, ranks + 4)) if units is None else units
    grain = draw(st.integers(1, 3)) if grain is None else grain
    extra = st.lists(st.integers(0, ranks - 1), min_size=units - ranks, max_size=units - ranks)
    owners = draw(st.permutations([*range(ranks), *draw(extra)]))
    held = [{unit for unit, owner in enumerate(owners) if owner == rank} for rank in range(ranks)]
    if overlapping:
        for part in held:
            part |= draw(st.sets(st.integers(0, units - 1)))
    return Layout(axis, units, grain, tuple(map(intervals_of, held)))


@st.composite
def runs(draw: st.DrawFn, units: int, ranks: int) -> tuple[tuple[Interval, ...], ...]:
    """Draw one non-empty run of units per rank."""
    inner = st.sets(st.integers(1, units - 1), min_size=ranks - 1, max_size=ranks - 1)
    cuts = [0, *sorted(draw(inner) if ranks > 1 else ()), units]
    return tuple(((a, b),) for a, b in pairwise(cuts))


@st.composite
def fused_layouts(draw: st.DrawFn, ranks: int, *, overlapping: bool = False) -> FusedLayout:
    count = draw(st.integers(1, 3))
    segments = [
        draw(layouts(ranks, overlapping=overlapping, axis=f"axis{i}")) for i in range(count)
    ]
    return FusedLayout(tuple(segments))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Draw an expression of the five kinds over tensors of one to three dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    recipe: Recipe = Tensor("t0", shape)
    for step in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(("slice", "concat", "again", "permute", "pad")))
        recipe = draw(_grown(recipe, kind, f"t{step + 1}"))
    return recipe


def _divisors(extent: int) -> list[int]:
    return [n for n in range(1, extent + 1) if extent % n == 0]


@st.composite
def _grown(draw: st.DrawFn, recipe: Recipe, kind: str, name: str) -> Recipe:
    shape = shape_of(recipe)
    dim = draw(st.integers(0, len(shape) - 1))
    extent = shape[dim]
    if kind == "pad":
        return Pad(recipe, dim, draw(st.integers(1, 2)))
    if kind == "permute":
        outer = draw(st.sampled_from(_divisors(extent)))
        middle = draw(st.sampled_from(_divisors(extent // outer)))
        view = (outer, middle, extent // outer // middle)
        return Permute(recipe, dim, view, tuple(draw(st.permutations((0, 1, 2)))))
    start = draw(st.integers(0, extent - 1))
    stop = draw(st.integers(start + 1, extent))
    if kind == "slice":
        return Slice(recipe, dim, start, stop)
    other: Recipe = Slice(recipe, dim, start, stop)
    if kind == "concat":
        rows = draw(st.integers(1, 3))
        other = Tensor(name, (*shape[:dim], rows, *shape[dim + 1 :]))
    return Concat(tuple(draw(st.permutations((recipe, other)))), dim)


def numbered(recipe_tensors: Iterable[Tensor]) -> dict[str, torch.Tensor]:
    """Return checkpoint tensors whose elements are distinct and non-zero."""
    tensors: dict[str, torch.Tensor] = {}
    next_number = 1
    for tensor in recipe_tensors:
        if tensor.name not in tensors:
            count = torch.Size(tensor.shape).numel()
            tensors[tensor.name] = torch.arange(next_number, next_number + count).view(tensor.shape)
            next_number += count
    return tensors
