"""Mistakes that keep every type: what a graph computes is wrong, and where it lies is right."""

from __future__ import annotations

import operator

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError, layer_of, place_of
from tpcompile.ir.meta import operand, parameters, type_of
from tpcompile.ir.ops import (
    COLLECTIVES,
    ELEMENTWISE,
    GATED_RMS_NORM,
    RMS_NORM,
    ROPE,
    SIGMOID_GATE,
    SPECS,
    SWIGLU,
    arguments_of,
)
from tpcompile.rewriting.rewrite import insert_after

aten = torch.ops.aten

_STEPS = (RMS_NORM, ROPE, SWIGLU, SIGMOID_GATE, GATED_RMS_NORM, *ELEMENTWISE)
"""The ops that may be skipped or doubled: norms, rotations, activations, additions, gates."""
_NUMBERS = ("eps", "scale", "head_eps")


def skipped(draft: Draft) -> str:
    """Leave out an op whose first operands have the type of its result."""
    options = [
        (node, source)
        for node in draft.calls(*_STEPS)
        for source in node.all_input_nodes
        if source.op != "get_attr" and type_of(source) == type_of(node)
    ]
    node, source = draft.pick(options, "op to skip")
    node.replace_all_uses_with(source)
    draft.graph.erase_node(node)
    return f"%{node.name} skipped, %{source.name} read instead"


def doubled(draft: Draft) -> str:
    """Apply an op to its own result."""
    options = [
        (node, place)
        for node in draft.calls(*_STEPS)
        for place, source in enumerate(node.args)
        if isinstance(source, fx.Node)
        and source.op != "get_attr"
        and type_of(source) == type_of(node)
    ]
    node, place = draft.pick(options, "op to double")
    args = list(node.args)
    args[place] = node
    second = insert_after(node, node.target, *args)
    second.meta["type"] = type_of(node)
    node.replace_all_uses_with(second, delete_user_cb=lambda user: user is not second)
    return f"%{node.name} applied twice"


def other_value(draft: Draft) -> str:
    """Read another earlier value of the same type."""
    order = {node: place for place, node in enumerate(draft.graph.nodes)}
    reader = draft.pick([n for n in order if n.op == "call_function"], "reader")
    places = [p for p, arg in enumerate(reader.args) if isinstance(arg, fx.Node)]
    place = draft.pick(places, "operand")
    old = operand(reader, place)
    options = [
        node
        for node in order
        if order[node] < order[reader]
        and node is not old
        and (node.op == "get_attr") == (old.op == "get_attr")
        and "type" in node.meta
        and type_of(node) == type_of(old)
    ]
    new = draft.pick(options, "value of the same type")
    reader.update_arg(place, new)
    _drop_unread(draft, old)
    return f"%{reader.name} reads %{new.name} instead of %{old.name}"


def _drop_unread(draft: Draft, node: fx.Node) -> None:
    """Erase a parameter that no node reads any more, as a pass would."""
    if node.op == "get_attr" and not node.users:
        draft.graph.erase_node(node)


def operands_swapped(draft: Draft) -> str:
    """Swap two operands of the same type: gate and up, keys and values, cosine and sine."""
    options = [
        (node, first, second)
        for node in draft.graph.nodes
        if node.op == "call_function"
        for first in range(len(node.args))
        for second in range(first + 1, len(node.args))
        if isinstance(node.args[first], fx.Node)
        and isinstance(node.args[second], fx.Node)
        and type_of(operand(node, first)) == type_of(operand(node, second))
        and node.args[first] is not node.args[second]
    ]
    node, first, second = draft.pick(options, "op with operands of one type")
    value, other = node.args[first], node.args[second]
    node.update_arg(first, other)
    node.update_arg(second, value)
    return f"operands {first} and {second} of %{node.name} swapped"


def items_swapped(draft: Draft) -> str:
    """Swap two results of one op where they are read."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for item in draft.calls(operator.getitem):
        groups.setdefault(operand(item), []).append(item)
    pairs = [
        (result, other)
        for items in groups.values()
        for result in items
        for other in items
        if result < other and type_of(result) == type_of(other)
    ]
    result, other = draft.pick(pairs, "two results of one type")
    first, second = result.args[1], other.args[1]
    result.update_arg(1, second)
    other.update_arg(1, first)
    return f"results {first} and {second} of %{operand(result).name} swapped"


def number(draft: Draft) -> str:
    """Change an epsilon or a scale."""
    options = [
        (node, name)
        for node in draft.graph.nodes
        if node.op == "call_function" and node.target in SPECS
        for name, value in arguments_of(node).items()
        if name in _NUMBERS and isinstance(value, float) and value
    ]
    node, name = draft.pick(options, "epsilon or scale")
    old = arguments_of(node)[name]
    new = draft.pick([1e-2, 3e-2] if name != "scale" else [old * 2, old / 2, 1.0], name)
    if new == old:
        raise UnfitError("it has this value")
    node.update_arg(place_of(node, name), new)
    return f"{name} of %{node.name} is {new}"


def other_op(draft: Draft) -> str:
    """Compute a product for a sum, or a sum for a product."""
    swaps = {aten.add.Tensor: aten.mul.Tensor, aten.mul.Tensor: aten.add.Tensor}
    node = draft.pick(draft.calls(*swaps), "sum or product")
    node.target = swaps[node.target]
    return f"%{node.name} computes {SPECS[node.target].name}"


def other_collective(draft: Draft) -> str:
    """Read the collective of another layer."""
    order = {node: place for place, node in enumerate(draft.graph.nodes)}
    collectives = draft.calls(*COLLECTIVES)
    pairs = [
        (reader, node, other)
        for node in collectives
        for reader in node.users
        for other in collectives
        if other is not node and order[other] < order[reader] and type_of(other) == type_of(node)
    ]
    reader, node, other = draft.pick(pairs, "other collective")
    reader.replace_input_with(node, other)
    return f"%{reader.name} reads %{other.name} instead of %{node.name}"


def other_parameter(draft: Draft) -> str:
    """Read a parameter of the same type from another place, swapped with it."""
    nodes = [n for n in parameters(draft.graph) if len(n.users) == 1]
    pairs = [
        (node, other)
        for node in nodes
        for other in nodes
        if node < other and type_of(node) == type_of(other) and layer_of(node) != layer_of(other)
    ]
    node, other = draft.pick(pairs, "two parameters of one type")
    (reader,), (other_reader,) = node.users, other.users
    if reader is other_reader:
        raise UnfitError("one op reads both")
    node.prepend(other)
    reader.replace_input_with(node, other)
    other_reader.replace_input_with(other, node)
    return f"%{node.name} and %{other.name} swapped"
