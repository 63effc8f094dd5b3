"""Checks that each bias is added once, to the result of its own weight, as captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import fx

from tpcompile.ir.info import GraphInfo
from tpcompile.ir.meta import has_recipe, made_of
from tpcompile.ir.ops import (
    ALL_GATHER,
    ALL_REDUCE,
    LINEAR,
    REDISTRIBUTE,
    REDUCE_SCATTER,
    SPECS,
    RuleError,
    arguments_of,
)

aten = torch.ops.aten

_OF_ONE_VALUE = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, REDISTRIBUTE, aten.to.dtype)
Pairs = frozenset[tuple[str, str]]


def captured_biases(graph: fx.Graph) -> Pairs:
    """Return the (bias, weight) pairs of tensor names in a captured graph."""
    return frozenset(
        (bias.name, weight.name)
        for node in graph.nodes
        if node.target is LINEAR and len(node.args) > 2 and _is_parameter(node.args[2])
        for bias in made_of(node.args[2])
        for weight in made_of(node.args[1])
    )


def wrong_biases(graph: fx.Graph, info: GraphInfo) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each bias that is added to the wrong projection or never added."""
    known = {name for name, _ in info.biases}
    lost = set(known)
    for node in graph.nodes:
        for weight, bias in _added(node):
            names = [tensor.name for tensor in made_of(bias)] if _is_parameter(bias) else []
            if not known.issuperset(names):
                continue
            lost.difference_update(names)
            weights = [] if weight is None else [tensor.name for tensor in made_of(weight)]
            if len(names) != len(weights) or not info.biases.issuperset(
                zip(names, weights, strict=True)
            ):
                yield node, _not_its_own(names, weights, info)
    if lost:
        got = f"{len(lost)} biases that are never added, for example {min(lost)}"
        output = next(iter(reversed(graph.nodes)))
        yield output, RuleError("bias-owner", got, "every bias of the captured model added once")


def computed_weights(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each linear whose weight is not a parameter, as if operands were swapped.

    Passes, lowering and emitted modules find a linear's weight by its recipe.
    """
    for node in graph.nodes:
        if node.target is LINEAR and not (len(node.args) > 1 and _is_parameter(node.args[1])):
            got = ", ".join(map(str, node.args[1:2])) or "no weight"
            expected = "a parameter, as in linear(input, weight, bias)"
            yield node, RuleError("weight", f"the weight %{got}", expected)


def _not_its_own(names: list[str], weights: list[str], info: GraphInfo) -> RuleError:
    owners = dict(info.biases)
    return RuleError(
        "bias-owner",
        f"{', '.join(names)} added to the result of "
        f"{', '.join(weights) or 'an op other than a bias-free linear'}",
        f"each bias added once, to the result of {', '.join(owners[name] for name in names)}",
    )


def _added(node: fx.Node) -> Iterator[tuple[fx.Node | None, Any]]:
    """Yield each bias that a node adds, with the weight whose result it is added to."""
    if node.target is aten.add.Tensor:
        left, right = node.args[:2]
        for value, bias in ((left, right), (right, left)):
            if _is_parameter(bias):
                yield _weight_behind(value), bias
        return
    spec = SPECS.get(node.target)
    names = [name for name in spec.argument_names if name.endswith("bias")] if spec else []
    bound = arguments_of(node) if names else {}
    for name in names:  # `bias` belongs to `weight`, `k_bias` to `k_weight`
        if bound.get(name) is not None:
            key = f"{name.removesuffix('bias')}weight"
            value = bound.get("partial") or (None if key in bound else next(iter(bound.values())))
            weight = bound[key] if value is None else _weight_behind(value)
            yield weight if _is_parameter(weight) else None, bound[name]


def _weight_behind(value: Any) -> fx.Node | None:
    """Look through collectives and casts for the bias-free linear of `value`; return its weight."""
    while isinstance(value, fx.Node) and value.target in _OF_ONE_VALUE:
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.target is not LINEAR or len(value.args) > 2:
        return None
    weight = value.args[1]
    return weight if _is_parameter(weight) else None


def _is_parameter(value: Any) -> TypeGuard[fx.Node]:
    return isinstance(value, fx.Node) and has_recipe(value)
