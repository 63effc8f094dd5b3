"""Mistakes in weights of few bits: other formats, other groups, and columns that are cut inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, relayout
from benchmarks.mutations.layouts import alike, part_of
from tpcompile.ir.format import Format, Kind
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import Parameter, parameter_of, parameters, set_parameter, value_type
from tpcompile.ir.recipe import Concat, Recipe, Tensor

_FINE = 4
"""The columns of which the parts of wrong cuts consist."""


def offsets_left_out(draft: Draft) -> str:
    """Leave out the offsets of a weight."""
    node, old = _few_bits(draft, lambda old: old.offsets)
    return _reformatted(draft, node, _changed(old, offsets=False))


def offsets_added(draft: Draft) -> str:
    """Give a weight offsets that the checkpoint does not have."""
    node, old = _few_bits(draft, lambda old: not old.offsets)
    return _reformatted(draft, node, _changed(old, offsets=True))


def other_groups(draft: Draft) -> str:
    """Let other numbers of columns share a scale."""
    node, old = _few_bits(draft, lambda old: True)
    columns = old.components[1].columns
    sizes = [columns // 2, 2 * columns, 0] if columns else [16, 32]
    return _reformatted(draft, node, _changed(old, columns=draft.pick(sizes, "size of groups")))


def other_bits(draft: Draft) -> str:
    """Take 4 bits for 8, or 8 for 4, or values for integers."""
    node, old = _few_bits(draft, lambda old: True)
    formats = [_changed(old, kind=kind) for kind in (Kind.INT4, Kind.INT8) if kind != old.kind]
    return _reformatted(draft, node, draft.pick([*formats, None], "format"))


def other_scales(draft: Draft) -> str:
    """Take scales of another dtype than those of the checkpoint."""
    node, old = _few_bits(draft, lambda old: True)
    dtypes = {torch.float32, torch.bfloat16, torch.float16} - {old.components[1].dtype.torch}
    scales = draft.pick(sorted(dtypes, key=str), "dtype of scales")
    return _reformatted(draft, node, _changed(old, scales=scales))


def cut_elsewhere(draft: Draft) -> str:
    """Cut the columns of a layer's down projection, and its producers, where no load begins."""
    nodes = [n for n in draft.split_parameters(1, "ffn") if value_type(n).format is not None]
    node = draft.pick(nodes, "down projection of few bits")
    old, columns = part_of(node, "ffn"), draft.pick((4, 8, 12), "columns")
    rank = draft.dice.randrange(old.ranks - 1)
    edges = [start for ((start, _),) in map(old.intervals, range(old.ranks))] + [old.size]
    edges[rank + 1] += columns
    units = [edge // _FINE for edge in edges]
    cut = tuple(((start, stop),) for start, stop in pairwise(units))
    for member in alike(draft, "ffn", node):
        relayout(member, "ffn", Layout("ffn", old.size // _FINE, _FINE, cut))
    return f"the layer of %{node.name} cut {columns} columns further after rank {rank}"


def _changed(old: Format, **changes: Any) -> Format:
    """Return a format with another kind, dtype of scales, size of groups or without offsets."""
    scales = old.components[1]
    same = {"scales": scales.dtype.torch, "columns": scales.columns, "offsets": old.offsets}
    return Format.grouped(**{"kind": old.kind, **same, **changes})


def _few_bits(draft: Draft, fits: Callable[[Format], bool]) -> tuple[fx.Node, Format]:
    """Pick a weight of few bits."""
    stored = {node: value_type(node).format for node in parameters(draft.graph)}
    return draft.pick(
        [(node, old) for node, old in stored.items() if old is not None and fits(old)],
        "weight in such a format",
    )


def _reformatted(draft: Draft, node: fx.Node, new: Format | None) -> str:
    """Change the format in a parameter's type, in its recipes, in both, or in those of one rank."""
    old, rank = parameter_of(node), draft.dice.randrange(draft.tp)
    where = draft.pick(("type", "recipes", "type and recipes", f"recipe of rank {rank}"), "place")
    shards = [
        shard
        if where == "type" or (where.endswith(str(rank)) and shard_rank != rank)
        else _with(shard, new)
        for shard_rank, shard in enumerate(old.shards)
    ]
    whole = _with(old.whole, new) if "recipes" in where else old.whole
    kind = replace(old.type, format=new) if "type" in where else old.type
    set_parameter(node, Parameter(kind, whole, tuple(shards)))
    return f"{new} in the {where} of %{node.name}, not {old.type.format}"


def _with(recipe: Recipe, new: Format | None) -> Recipe:
    match recipe:
        case Tensor():
            return replace(recipe, format=new)
        case Concat(sources=sources):
            return replace(recipe, sources=tuple(_with(source, new) for source in sources))
        case _:
            return replace(recipe, source=_with(recipe.source, new))
