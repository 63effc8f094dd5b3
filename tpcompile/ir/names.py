"""The names of values: their layer, and their role in it.

The queries of layer 3 are `%l3_q`, and after their norm `%l3_q_normed`. Values outside the layers
have no prefix. An op without a rule here names its result after itself.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import fx

from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import (
    ADD_RMS_NORM,
    ALL_GATHER,
    ALL_REDUCE,
    ATTENTION,
    CAUSAL_CONV,
    DELTA_DECAY,
    EMBEDDING,
    GATED_DELTA_RULE,
    GATED_RMS_NORM,
    LINEAR,
    PAGED_ATTENTION,
    REDISTRIBUTE,
    REDUCE_SCATTER,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    RMS_NORM,
    ROPE,
    SIGMOID_GATE,
    VOCAB_EMBEDDING,
)

aten = torch.ops.aten

_NUMBER = re.compile(r"(_default)?(_\d+)?$")
"""The suffix that torch appends to the name of an op."""
_NORM = re.compile(r"_?(layer_?)?norm$")
_Rule = Callable[[fx.Node], str]
_RESERVED = ("self", "torch", "F", "tpc", "layer", "output")
"""Names with a meaning in emitted modules."""


def prefix_of(layer: int | None) -> str:
    """Return the first part of the names in a layer."""
    return "" if layer is None else f"l{layer}_"


@cache
def is_name(text: str) -> bool:
    """Return whether an emitted module may give a value or a parameter this name."""
    return text.isidentifier() and not keyword.iskeyword(text) and text not in _RESERVED


def short_name(node: fx.Node) -> str:
    """Return the name of a value or of a parameter without its layer."""
    name = str(node.target) if node.op == "get_attr" else node.name
    short = name.removeprefix(prefix_of(origin_of(node).layer))
    return short if is_name(short) else name


def base_name(node: fx.Node) -> str:
    """Return the short name without a number."""
    short = short_name(node)
    base = _NUMBER.sub("", short)
    return base if is_name(base) else short


def name_values(graph: fx.Graph, known: Collection[fx.Node] = ()) -> None:
    """Give each value that is not in `known` the name of its role."""
    new = [node for node in graph.nodes if node.op.startswith("call") and node not in known]
    taken = {node.name for node in graph.nodes} - {node.name for node in new}
    for node in new:
        prefix = prefix_of(origin_of(node).layer)
        wanted = prefix + _role(node).removeprefix(prefix)
        name, number = wanted, 0
        while name in taken or hasattr(builtins, name):  # torch would rename `pow` in a copy
            number += 1
            name = f"{wanted}_{number}"
        taken.add(name)
        if name != node.name:
            graph._graph_namespace.create_name(name, None)  # torch must not choose it later
            node.name = name


def _role(node: fx.Node) -> str:
    rule = _RULES.get(node.target)
    name = rule(node) if rule is not None else ""
    return name if is_name(name) else base_name(node)


def _then(suffix: str) -> _Rule:
    return lambda node: base_name(operand(node)) + suffix


def _linear(node: fx.Node) -> str:
    if origin_of(node).layer is None:
        return origin_of(node).module.rpartition(".")[2]
    return short_name(operand(node, 1)).removesuffix("_weight")


def _norm(node: fx.Node, weight: int = 1) -> str:
    return _normed(operand(node, weight))


def _normed(weight: fx.Node) -> str:
    prefix = _NORM.sub("", short_name(weight).removesuffix("_weight"))
    return f"{prefix}_normed" if prefix else "normed"


def _scaled(node: fx.Node) -> str:
    """Name the last product of a norm that is not one op yet, by its weight."""
    weights = [weight for weight in map(_scale_of, node.args) if _is_norm_weight(weight)]
    return _normed(weights[0]) if weights else ""


def _scale_of(arg: Any) -> Any:
    """Return the weight of a scale that may be `1 + weight`, in a wider dtype."""
    while isinstance(arg, fx.Node) and arg.target in (aten.add.Tensor, aten.to.dtype):
        arg = next(iter(arg.all_input_nodes), None)
    return arg


def _is_norm_weight(arg: Any) -> bool:
    known = isinstance(arg, fx.Node) and arg.op == "get_attr"
    return known and _NORM.search(short_name(arg).removesuffix("_weight")) is not None


def _view(node: fx.Node) -> str:
    """Name the heads of a projection, `q` for `q_proj`, or of some of its channels."""
    name = base_name(operand(node)).removeprefix("in_proj_")
    return name.removesuffix("_proj").removesuffix("_conv")


def _rotated(node: fx.Node) -> str:
    return base_name(operand(node)).removesuffix("_normed") + "_rotated"


def _item(node: fx.Node) -> str:
    source, place = operand(node), node.args[1]
    if source.target is ADD_RMS_NORM:
        return _norm(source, 2) if place == 0 else "residual"
    if source.target not in (aten.split_with_sizes.default, aten.chunk.default):
        return ""
    return _PARTS.get((base_name(operand(source)), place), "")


_PARTS: dict[Any, str] = {
    **{("conv", place): f"{name}_conv" for place, name in enumerate("qkv")},
    ("q", 0): "queries",
    ("q", 1): "gate",
}
"""The names of parts of a value: of all channels of a convolution, and of heads with a gate."""


def _share(node: fx.Node) -> str:
    readers = (GATED_DELTA_RULE, RESUMED_DELTA_RULE)
    return "beta" if any(user.target in readers for user in node.users) else ""


def _add(node: fx.Node) -> str:
    """Name the sums of a layer itself; those of its modules are parts of a norm or a rotation."""
    origin = origin_of(node)
    return "residual" if origin.module.rpartition(".")[2] == str(origin.layer) else ""


_RULES: dict[Any, _Rule] = {
    LINEAR: _linear,
    RMS_NORM: _norm,
    ROPE: _rotated,
    ATTENTION: lambda node: "attention",
    PAGED_ATTENTION: lambda node: "attention",
    SIGMOID_GATE: lambda node: "gated",
    CAUSAL_CONV: lambda node: "conv",
    RESUMED_CONV: lambda node: "conv",
    DELTA_DECAY: lambda node: "decay",
    aten.sigmoid.default: _share,
    GATED_DELTA_RULE: lambda node: "delta_rule",
    RESUMED_DELTA_RULE: lambda node: "delta_rule",
    GATED_RMS_NORM: lambda node: _norm(node, 2),
    aten.type_as.default: _then(""),
    EMBEDDING: lambda node: "embedding",
    VOCAB_EMBEDDING: lambda node: "embedding",
    ALL_REDUCE: _then("_sum"),
    REDUCE_SCATTER: _then("_sum"),
    ALL_GATHER: _then("_whole"),
    REDISTRIBUTE: _then("_whole"),
    operator.getitem: _item,
    aten.add.Tensor: _add,
    aten.mul.Tensor: _scaled,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.transpose.int: _view,
    aten.unflatten.int: _view,
    aten.flatten.using_ints: _then("_flat"),
    aten.repeat_interleave.self_int: _then("_repeated"),
    aten.split_with_sizes.default: _then("_parts"),
    aten.index_select.default: _then("_selected"),
}
"""A name that depends on the operands; if it is empty, the value keeps its own."""
