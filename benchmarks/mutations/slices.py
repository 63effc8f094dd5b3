"""Mistakes in recipes: ranks read other parts of the checkpoint than their types say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from torch import fx

from benchmarks.mutations.draft import (
    Draft,
    UnfitError,
    layer_of,
    renamed,
    segments_of,
    set_shard,
    shard_of,
    slice_anew,
    slices,
)
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.recipe import Concat, Recipe, shape_of, shard


def swapped(draft: Draft) -> str:
    """Swap the parts that two ranks read."""
    node = draft.pick(draft.split_parameters(), "split parameter")
    shards = parameter_of(node).shards
    pairs = [(a, b) for a, b in combinations(range(draft.tp), 2) if shards[a] != shards[b]]
    rank, other = draft.pick(pairs, "two ranks with different parts")
    set_shard(node, rank, shards[other])
    set_shard(node, other, shards[rank])
    return f"ranks {rank} and {other} swapped in %{node.name}"


def swapped_heads(draft: Draft) -> str:
    """Make a rank read two of its heads in the wrong order."""
    node = draft.pick(
        draft.split_parameters(axis="q_heads") + draft.split_parameters(axis="kv_heads"), "heads"
    )
    rank = draft.dice.randrange(draft.tp)
    runs = [
        (first, first + part.grain)
        for part, (start, stop) in slices(node, rank)
        for first in range(start, stop, part.grain)
    ]
    widths = [(part.axis, number) for number, part in _units(node, rank)]
    pairs = [(i, j) for i, j in combinations(range(len(runs)), 2) if widths[i] == widths[j]]
    head, other = draft.pick(pairs, "rank with two heads of one kind")
    runs[head], runs[other] = runs[other], runs[head]
    slice_anew(node, rank, runs)
    return f"slices {head} and {other} of rank {rank} swapped in %{node.name}"


def _units(node: fx.Node, rank: int) -> list[tuple[int, Layout]]:
    """Return the segment number and the segment of each unit of a rank."""
    return [
        (number, part) for number, part in enumerate(segments_of(node)) for _ in part.units_of(rank)
    ]


def shifted(draft: Draft) -> str:
    """Start one run of one rank some elements too early or too late."""
    node = draft.pick(draft.split_parameters(), "split parameter")
    rank = draft.dice.randrange(draft.tp)
    runs = slices(node, rank)
    size = shape_of(parameter_of(node).whole)[shard_of(node).dim]
    options = [
        (place, step)
        for place, (part, (start, stop)) in enumerate(runs)
        for step in {1, -1, part.grain, -part.grain}
        if start + step >= 0 and stop + step <= size
    ]
    place, step = draft.pick(sorted(options), "room to shift")
    intervals = [run for _, run in runs]
    start, stop = intervals[place]
    intervals[place] = (start + step, stop + step)
    slice_anew(node, rank, intervals)
    return f"run {place} of rank {rank} of %{node.name} shifted by {step}"


def other_layer(draft: Draft) -> str:
    """Make one rank read the tensor of another layer."""
    options = [n for n in draft.split_parameters() if layer_of(n) is not None]
    node = draft.pick(options, "parameter of a layer")
    layer = layer_of(node)
    rank = draft.dice.randrange(draft.tp)
    recipe = parameter_of(node).shards[rank]
    set_shard(node, rank, renamed(recipe, f".{layer}.", f".{1 - (layer or 0)}."))
    return f"rank {rank} of %{node.name} reads layer {1 - (layer or 0)}"


def fused_as_one(draft: Draft) -> str:
    """Split a fused weight evenly as if it were one axis; the type may or may not agree."""
    node = _fused(draft)
    parameter = parameter_of(node)
    rows = int(parameter.type.shape[0])
    runs = even_runs(rows, draft.tp)
    if draft.dice.random() < 0.5:
        set_parameter(node, parameter.sharded(0, Layout("fused", rows, 1, runs)))
        return f"%{node.name} sharded as one axis"
    set_parameter(
        node, replace(parameter, shards=tuple(shard(parameter.whole, 0, run) for run in runs))
    )
    return f"the recipes of %{node.name} cut it into even runs"


def parts_swapped(draft: Draft) -> str:
    """Concatenate the parts of a fused weight on some ranks in another order than the layout's."""
    node = _fused(draft)
    count = len(segments_of(node))
    part, other = draft.pick(combinations(range(count), 2), "two parts")
    ranks = range(draft.tp) if draft.dice.random() < 0.5 else [draft.dice.randrange(draft.tp)]
    for rank in ranks:
        set_shard(node, rank, swap_parts(parameter_of(node).shards[rank], part, other))
    return f"parts {part} and {other} of %{node.name} swapped on ranks {list(ranks)}"


def swap_parts(recipe: Recipe, part: int, other: int) -> Recipe:
    if not isinstance(recipe, Concat) or other >= len(recipe.sources):
        raise UnfitError("the parts are next to each other in one tensor")
    sources = list(recipe.sources)
    sources[part], sources[other] = sources[other], sources[part]
    return replace(recipe, sources=tuple(sources))


def transposed_split(draft: Draft) -> str:
    """Split a row-parallel weight along its rows, though the type says columns."""
    node = draft.pick(draft.split_parameters(dim=1), "row-parallel weight")
    parameter = parameter_of(node)
    runs = even_runs(int(parameter.type.shape[0]), draft.tp)
    shards = tuple(shard(parameter.whole, 0, run) for run in runs)
    set_parameter(node, replace(parameter, shards=shards))
    return f"the recipes of %{node.name} cut rows"


def _fused(draft: Draft) -> fx.Node:
    fused = [n for n in draft.split_parameters(dim=0) if len(segments_of(n)) > 1]
    if not fused:
        raise UnfitError("nothing is fused")
    return draft.pick(fused, "fused parameter")
