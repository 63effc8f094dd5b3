"""Helpers for fusing linears: join their parameters, and split the result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch
from torch import fx

from tpcompile.ir.layout import AnyLayout, FusedLayout, Layout
from tpcompile.ir.meta import Parameter, new_parameter, origin_of, parameter_of, value_type
from tpcompile.ir.ops import LINEAR, arguments_of
from tpcompile.ir.recipe import Concat
from tpcompile.ir.roles import joined_roles
from tpcompile.ir.types import Shard, ValueType
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import insert, insert_item, replace
from tpcompile.rewriting.structure import bias_of, weight_of

aten = torch.ops.aten


def fuse_linears(gm: fx.GraphModule, linears: list[fx.Node]) -> None:
    """Replace linears that read the same input with one linear and a split of its result.

    Each rank's weight is the concatenation of its parts of the weights. The sizes of the split
    are global; each rank's sizes follow from the layout.
    """
    first = linears[0]
    _check_fusable(linears)
    with gm.graph.inserting_before(min(linears)):  # the first in graph order
        fused = _joined_linear(gm, linears)
        sizes = [value_type(linear).shape[-1] for linear in linears]
        dim = value_type(first).dims - 1
        split = insert(first, aten.split_with_sizes.default, fused, sizes, dim)
        parts = [
            insert_item(linear, split, i, origin_of(linear).module.rpartition(".")[2] or "part")
            for i, linear in enumerate(linears)
        ]
    for linear, part in zip(linears, parts, strict=True):
        replace(linear, part)
        gm.graph.erase_node(linear)


def join_linears(gm: fx.GraphModule, concatenation: fx.Node) -> None:
    """Replace a concatenation of the results of linears with the result of one linear."""
    linears: list[fx.Node] = arguments_of(concatenation)["tensors"]
    check(len(set(linears)) == len(linears), concatenation, "it has the same linear twice")
    for linear in linears:
        check(len(linear.users) == 1, linear, f"a node other than %{concatenation.name} reads it")
    _check_fusable(linears)
    with gm.graph.inserting_before(concatenation):
        replace(concatenation, _joined_linear(gm, linears))
    for node in (concatenation, *linears):
        gm.graph.erase_node(node)


def _joined_linear(gm: fx.GraphModule, linears: list[fx.Node]) -> fx.Node:
    """Insert one linear with the rows of several."""
    first = linears[0]
    operands = [first.args[0], _joined_parameter(gm, [weight_of(linear) for linear in linears])]
    biases = [bias for linear in linears if (bias := bias_of(linear)) is not None]
    if biases:
        operands.append(_joined_parameter(gm, biases))
    return insert(first, LINEAR, *operands)


def _check_fusable(linears: list[fx.Node]) -> None:
    first = linears[0]
    for linear in linears[1:]:
        check(
            linear.args[0] is first.args[0], linear, f"its input differs from that of %{first.name}"
        )
        check(
            (bias_of(linear) is None) == (bias_of(first) is None),
            linear,
            f"it and %{first.name} must both have a bias, or neither",
        )
    for linear in linears:
        weight = weight_of(linear)
        check(
            weight.op == "get_attr" and len(weight.users) == 1,
            linear,
            "its weight must be a parameter that no other node reads",
        )
        check(
            value_type(weight).format == value_type(weight_of(first)).format,
            linear,
            f"the formats of its weight and of that of %{first.name} differ",
        )
        split = isinstance(value_type(weight).placement, Shard)
        check(
            not split or value_type(weight).layout_of(0) is not None,
            linear,
            "its weight must be sharded by rows",
        )
        check(
            split == isinstance(value_type(weight_of(first)).placement, Shard),
            linear,
            f"it and %{first.name} must both be sharded, or neither",
        )


def _joined_parameter(gm: fx.GraphModule, nodes: list[fx.Node]) -> fx.Node:
    joined = _joined([parameter_of(node) for node in nodes])
    name = joined_name([str(node.target) for node in nodes])
    return new_parameter(gm.graph, name, joined, origin_of(nodes[0]), gm)


def _joined(parts: list[Parameter]) -> Parameter:
    whole = Concat(tuple(part.whole for part in parts), 0)
    shards = tuple(
        Concat(recipes, 0) for recipes in zip(*(part.shards for part in parts), strict=True)
    )
    rows = [int(part.type.shape[0]) for part in parts]
    role = joined_roles([(n, part.type.role) for n, part in zip(rows, parts, strict=True)])
    first = parts[0].type
    kind = ValueType((sum(rows), *first.shape[1:]), first.dtype, role=role, format=first.format)
    layouts = [part.type.layout_of(0) for part in parts]
    if layouts[0] is not None:
        kind = kind.sharded(0, FusedLayout(tuple(_segments(layouts))))
    return Parameter(kind, whole, shards)


def _segments(layouts: Iterable[AnyLayout | None]) -> Iterator[Layout]:
    for layout in layouts:
        if isinstance(layout, FusedLayout):
            yield from layout.segments
        elif isinstance(layout, Layout):
            yield layout


def _shared(lists: list[list[str]]) -> int:
    """Return the length of the longest common prefix of the lists."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def joined_name(names: list[str]) -> str:
    """Join names: `l0_q_proj_weight` and `l0_k_proj_weight` give `l0_q_k_proj_weight`."""
    split = [re.split(r"(?<=_)", name) for name in names]
    ahead = _shared(split)
    behind = _shared([parts[ahead:][::-1] for parts in split])
    middles = ["".join(parts[ahead : len(parts) - behind]) for parts in split]
    first = split[0]
    return "".join(first[:ahead]) + "".join(middles) + "".join(first[len(first) - behind :])
