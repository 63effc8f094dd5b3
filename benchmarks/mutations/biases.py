"""Mistakes in biases: dropped, added elsewhere, or taken from another projection."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, layer_of, segments_of
from tpcompile.ir.meta import operand, parameter_of, set_parameter, type_of, value_type
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.recipe import Concat
from tpcompile.rewriting.rewrite import insert_after
from tpcompile.rewriting.structure import bias_of

aten = torch.ops.aten


def _biased(draft: Draft) -> list[fx.Node]:
    return [node for node in draft.calls(LINEAR) if bias_of(node) is not None]


def _bias(node: fx.Node) -> fx.Node:
    bias = bias_of(node)
    assert bias is not None
    return bias


def dropped(draft: Draft) -> str:
    """Drop the bias of a linear or the bias added after a sum, maybe with its parameter."""
    added = _added(draft)
    node = draft.pick([*_biased(draft), *added], "bias")
    if node in added:
        bias = operand(node, 1)
        node.replace_all_uses_with(operand(node))
        draft.graph.erase_node(node)
    else:
        bias = _bias(node)
        node.args = node.args[:2]
    if draft.dice.random() < 0.5 and not bias.users:
        draft.graph.erase_node(bias)
    return f"%{bias.name} dropped"


def of_another_layer(draft: Draft) -> str:
    """Give a linear the bias of an earlier layer, or swap the two biases."""
    return _taken(draft, one_layer=False)


def of_another_projection(draft: Draft) -> str:
    """Take the bias of another projection in the layer, with the same shape and layout.

    For example, values take the bias of keys, or up takes that of gate.
    """
    return _taken(draft, one_layer=True)


def _taken(draft: Draft, *, one_layer: bool) -> str:
    """Give the later linear the bias of the earlier one, or swap the two biases."""
    pairs = [
        (a, b)
        for a, b in combinations(_biased(draft), 2)
        if (layer_of(a) == layer_of(b)) == one_layer and type_of(_bias(a)) == type_of(_bias(b))
    ]
    node, other = draft.pick(pairs, "two equal types of bias")
    first, second = _bias(node), _bias(other)
    other.update_arg(2, first)
    if draft.dice.random() < 0.5:
        node.prepend(second)
        node.update_arg(2, second)
        return f"%{node.name} and %{other.name} with each other's bias"
    return f"%{other.name} with %{first.name}"


def parts_swapped(draft: Draft) -> str:
    """Swap the last two parts of a fused bias, but not those of its weight."""
    fused = [n for n in _biased(draft) if isinstance(parameter_of(_bias(n)).whole, Concat)]
    bias = _bias(draft.pick(fused, "fused bias"))
    parameter = parameter_of(bias)
    assert isinstance(parameter.whole, Concat)
    sources = list(parameter.whole.sources)
    sources[-1], sources[-2] = sources[-2], sources[-1]
    layout = value_type(bias).layout_of(0)
    whole = Concat(tuple(sources), 0)
    new = type(parameter)(parameter.type, whole, ()).on_ranks(draft.tp)
    set_parameter(bias, new.sharded(0, layout) if layout is not None else new)  # type: ignore[arg-type]
    return f"the last parts of %{bias.name} swapped, of {len(segments_of(bias))}"


def added_before_sum(draft: Draft) -> str:
    """Add a bias to the terms of a sum instead of the sum."""
    node = draft.pick(_added(draft), "bias after a sum")
    total, bias = operand(node), operand(node, 1)
    linear = total
    while linear.target is not LINEAR:
        linear = operand(linear)
    early = insert_after(linear, aten.add.Tensor, linear, bias)
    linear.prepend(bias)
    early.meta["type"] = value_type(linear)
    linear.replace_all_uses_with(early, delete_user_cb=lambda user: user is not early)
    node.replace_all_uses_with(total)
    draft.graph.erase_node(node)
    return f"%{bias.name} added to the terms of %{linear.name}"


def added_twice(draft: Draft) -> str:
    """Add a bias both in a linear and after it, or twice after a sum."""
    added = _added(draft)
    node = draft.pick([*_biased(draft), *added], "bias")
    bias = operand(node, 1) if node in added else _bias(node)
    second_sum = insert_after(node, aten.add.Tensor, node, bias)
    second_sum.meta["type"] = type_of(node)
    node.replace_all_uses_with(second_sum, delete_user_cb=lambda user: user is not second_sum)
    return f"%{bias.name} added twice"


def added_elsewhere(draft: Draft) -> str:
    """Swap the biases after the sums of two blocks."""
    added = _added(draft)
    pairs = [
        (a, b)
        for a, b in combinations(added, 2)
        if type_of(operand(a, 1)) == type_of(operand(b, 1))
    ]
    node, other = draft.pick(pairs, "two biases after sums")
    first, second = operand(node, 1), operand(other, 1)
    node.prepend(second)
    node.update_arg(1, second)
    other.update_arg(1, first)
    return f"%{node.name} and %{other.name} with each other's bias"


def _added(draft: Draft) -> list[fx.Node]:
    """Return the additions of a parameter."""
    return [
        node
        for node in draft.calls(aten.add.Tensor)
        if isinstance(node.args[1], fx.Node) and node.args[1].op == "get_attr"
    ]
