"""Splitting linears that a model stores fused, such as those of queries, keys and values."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from tpcompile.ir.info import info_of
from tpcompile.ir.meta import Parameter, new_parameter, origin_of, parameter_of, value_type
from tpcompile.ir.ops import LINEAR, arguments_of
from tpcompile.ir.recipe import Recipe, shape_of, take
from tpcompile.ir.roles import Role
from tpcompile.ir.types import REPLICATE
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import insert, replace
from tpcompile.rewriting.structure import bias_of, weight_of

aten = torch.ops.aten


def split_linear(gm: fx.GraphModule, linear: fx.Node) -> None:
    """Replace a linear whose result is only sliced with one linear per slice.

    Raise MissError if another node reads the whole result.
    """
    parts = _parts(linear)
    for place, ((start, stop), readers) in enumerate(sorted(parts.items())):
        with gm.graph.inserting_before(linear):
            rows = partial(_run_of, start=start, stop=stop)
            part = insert_part(gm, linear, readers[0], place, rows)
        for reader in readers:
            replace(reader, part)


def _parts(linear: fx.Node) -> dict[tuple[int, int], list[fx.Node]]:
    """Return the readers of each range of the features of a linear."""
    parts: dict[tuple[int, int], list[fx.Node]] = {}
    for user in linear.users:
        for rows, reader in _slices(linear, user):
            parts.setdefault(rows, []).append(reader)
    check(parts, linear, "no node reads it")
    return parts


def _slices(linear: fx.Node, user: fx.Node) -> list[tuple[tuple[int, int], fx.Node]]:
    """Return the features that a reader of a linear takes, and the nodes that have them."""
    width, last = value_type(linear).shape[-1], value_type(linear).dims - 1
    slices = (aten.slice.Tensor, aten.split_with_sizes.default)
    check(user.target in slices and isinstance(width, int), user, "it reads the whole result")
    assert isinstance(width, int)
    bound = arguments_of(user)
    check(bound["dim"] % (last + 1) == last, user, "it slices tokens")
    if user.target is aten.slice.Tensor:
        start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(width)
        check(step == 1 and start < stop, user, "its elements are not one run")
        return [((start, stop), user)]
    sizes = bound["split_sizes"]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    items = [item for item in user.users if item.target is operator.getitem]
    check(len(items) == len(user.users), user, "its parts are not read one by one")
    places: list[int] = [int(item.args[1]) for item in items]  # type: ignore[arg-type]
    return [
        ((starts[place], starts[place] + sizes[place]), item)
        for place, item in zip(places, items, strict=True)
    ]


def _run_of(whole: Recipe, start: int, stop: int) -> Recipe:
    recipe = take(whole, 0, start, stop)
    assert shape_of(recipe)[0] == stop - start
    return recipe


def insert_part(
    gm: fx.GraphModule,
    linear: fx.Node,
    like: fx.Node,
    place: int,
    rows: Callable[[Recipe], Recipe],
    role: Callable[[int], Role] | None = None,
) -> fx.Node:
    """Insert a linear with some rows of another one. The role may depend on their number."""

    def part_of(node: fx.Node) -> fx.Node:
        whole = parameter_of(node)
        plain = whole.type.role is None and whole.type.placement == REPLICATE
        check(plain, node, "its rows are in another order, or on several ranks")
        recipe = rows(whole.whole)
        parameter = Parameter.replicated(recipe, whole.type.dtype, info_of(gm).tp)
        if role is not None:
            kind = parameter.type.in_role(role(shape_of(recipe)[0]))
            parameter = dataclasses.replace(parameter, type=kind)
        name, _, suffix = str(node.target).rpartition("_")
        return new_parameter(gm.graph, f"{name}_{place}_{suffix}", parameter, origin_of(node), gm)

    parameters = (weight_of(linear), bias_of(linear))
    operands = [part_of(node) for node in parameters if node is not None]
    return insert(like, LINEAR, linear.args[0], *operands)
