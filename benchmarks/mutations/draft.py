"""A cloned graph for mutators to edit, with random choices and common queries."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from benchmarks.mutations.subjects import TILED
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import AnyLayout, FusedLayout, Interval, Layout, TokenLayout
from tpcompile.ir.meta import (
    Parameter,
    new_parameter,
    origin_of,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import ATTENTION, LINEAR, PAGED_ATTENTION, SPECS
from tpcompile.ir.recipe import Concat, Recipe, Tensor, shard
from tpcompile.ir.types import Shard

T = TypeVar("T")
aten = torch.ops.aten


class UnfitError(Exception):
    """The graph has no place for this mistake."""


@dataclass
class Draft:
    """A clone of a sharded graph that a mutator edits in place."""

    gm: fx.GraphModule
    dice: random.Random

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @property
    def tp(self) -> int:
        return info_of(self.gm).tp

    def pick(self, options: Iterable[T], description: str) -> T:
        choices = list(options)
        if not choices:
            raise UnfitError(f"there is no {description}")
        return self.dice.choice(choices)

    def calls(self, *targets: Any) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.target in targets]

    def attentions(self) -> list[fx.Node]:
        """Return the attention nodes, with a KV cache and without one."""
        return self.calls(ATTENTION, PAGED_ATTENTION)

    def split_parameters(self, dim: int | None = None, axis: str = "") -> list[fx.Node]:
        """Return the parameters that are split along `dim`, with `axis` among their axes."""
        return [
            node
            for node in parameters(self.graph)
            if isinstance(kind := value_type(node).placement, Shard)
            and dim in (None, kind.dim)
            and (not axis or any(part.axis == axis for part in segments(kind.layout)))
        ]

    def new_parameter(self, anchor: fx.Node, name: str, parameter: Parameter) -> fx.Node:
        """Insert a parameter right before `anchor`."""
        with self.graph.inserting_before(anchor):
            return new_parameter(self.graph, name, parameter, origin_of(anchor), self.gm)


def segments(layout: AnyLayout) -> tuple[Layout, ...]:
    """Return the layouts that are concatenated along a dimension."""
    if isinstance(layout, FusedLayout):
        return layout.segments
    return () if isinstance(layout, TokenLayout) else (layout,)


def place_of(node: fx.Node, argument: str) -> int:
    """Return the position of the argument with this name."""
    return SPECS[node.target].argument_names.index(argument)


def shard_of(node: fx.Node) -> Shard:
    placement = value_type(node).placement
    assert isinstance(placement, Shard)
    return placement


def segments_of(node: fx.Node) -> tuple[Layout, ...]:
    return segments(shard_of(node).layout)


def layer_of(node: fx.Node) -> int | None:
    return origin_of(node).layer


def joined(parts: tuple[Layout, ...]) -> Layout | FusedLayout:
    return parts[0] if len(parts) == 1 else FusedLayout(parts)


def relayout(node: fx.Node, axis: str, new: Layout) -> None:
    """Replace the layout of `axis` in a parameter by `new`, which has its own units.

    The type and all recipes agree with each other, but not with the rest of the graph.
    """
    parts = tuple(new if part.axis == axis else part for part in segments_of(node))
    set_parameter(node, parameter_of(node).sharded(shard_of(node).dim, joined(parts)))


def with_parts(layout: Layout, parts: Iterable[tuple[Interval, ...]]) -> Layout:
    return replace(layout, parts=tuple(parts))


def replicate(node: fx.Node, ranks: int) -> None:
    parameter = parameter_of(node)
    set_parameter(node, Parameter.replicated(parameter.whole, parameter.type.dtype, ranks))


def set_shard(node: fx.Node, rank: int, recipe: Recipe) -> None:
    """Replace the recipe of one rank, but not the type."""
    parameter = parameter_of(node)
    shards = list(parameter.shards)
    shards[rank] = recipe
    set_parameter(node, replace(parameter, shards=tuple(shards)))


def slices(node: fx.Node, rank: int) -> list[tuple[Layout, Interval]]:
    """Return the runs of a rank along the split dimension, each with its layout."""
    runs = []
    offset = 0
    for part in segments_of(node):
        runs += [(part, (offset + a, offset + b)) for a, b in part.intervals(rank)]
        offset += part.size
    return runs


def slice_anew(node: fx.Node, rank: int, intervals: Iterable[Interval]) -> None:
    """Make a rank read these runs along the split dimension, without changing the type."""
    whole, dim = parameter_of(node).whole, shard_of(node).dim
    set_shard(node, rank, shard(whole, dim, list(intervals)))


def tiled(tensor: Recipe, length: int) -> Recipe:
    """Return a vector that is repeated until it has `length` elements."""
    assert isinstance(tensor, Tensor)
    return Tensor(f"{tensor.name}{TILED}{length}", (length,))


def renamed(recipe: Recipe, old: str, new: str) -> Recipe:
    """Return the recipe with `old` replaced by `new` in all tensor names."""
    match recipe:
        case Tensor(name=name):
            return replace(recipe, name=name.replace(old, new))
        case Concat(sources=sources):
            return replace(recipe, sources=tuple(renamed(s, old, new) for s in sources))
        case _:
            return replace(recipe, source=renamed(recipe.source, old, new))


def linears_behind(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nearest linears among the producers of a value in its layer."""
    if node.target is LINEAR:
        yield node
        return
    for source in node.all_input_nodes:
        if layer_of(source) == layer_of(node) and source.op == "call_function":
            yield from linears_behind(source)


def rank_of_some(draft: Draft, fits: Iterable[bool]) -> int:
    return draft.pick([rank for rank, fit in enumerate(fits) if fit], "rank that it fits")
