"""Mistakes with biases: dropped, added elsewhere, or those of another projection."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, layer_of, segments_of
from tpcompile.ir.meta import (
    operand,
    parameter_of,
    set_parameter,
    type_of,
    value_type,
)
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
    """The bias of a linear, or that behind a sum, is left out; its parameter may go too."""
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
    """One linear takes the bias of the layer before it, or two take each other's."""
    return _taken(draft, one_layer=False)


def of_another_projection(draft: Draft) -> str:
    """Of keys for values, of gate for up: alike in shape and layout, in one layer."""
    return _taken(draft, one_layer=True)


def _taken(draft: Draft, *, one_layer: bool) -> str:
    """The later linear takes the bias of the earlier; and the earlier that of the later."""
    pairs = [
        (a, b)
        for a, b in combinations(_biased(draft), 2)
        if (layer_of(a) == layer_of(b)) == one_layer and type_of(_bias(a)) == type_of(_bias(b))
    ]
    one, other = draft.pick(pairs, "two biases alike")
    first, second = _bias(one), _bias(other)
    other.update_arg(2, first)
    if draft.dice.random() < 0.5:
        one.prepend(second)
        one.update_arg(2, second)
        return f"%{one.name} and %{other.name} with each other's bias"
    return f"%{other.name} with %{first.name}"


def parts_swapped(draft: Draft) -> str:
    """Of a fused bias two parts alike change places; its weight stays."""
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
    """A bias that belongs behind a sum is added to the terms of it."""
    node = draft.pick(_added(draft), "bias behind a sum")
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
    """In the linear and behind it, or behind the sum once more."""
    added = _added(draft)
    node = draft.pick([*_biased(draft), *added], "bias")
    bias = operand(node, 1) if node in added else _bias(node)
    again = insert_after(node, aten.add.Tensor, node, bias)
    again.meta["type"] = type_of(node)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return f"%{bias.name} added twice"


def added_elsewhere(draft: Draft) -> str:
    """A bias behind one sum is added behind that of another block."""
    added = _added(draft)
    pairs = [
        (a, b)
        for a, b in combinations(added, 2)
        if type_of(operand(a, 1)) == type_of(operand(b, 1))
    ]
    one, other = draft.pick(pairs, "two biases behind sums")
    first, second = operand(one, 1), operand(other, 1)
    one.prepend(second)
    one.update_arg(1, second)
    other.update_arg(1, first)
    return f"%{one.name} and %{other.name} with each other's bias"


def _added(draft: Draft) -> list[fx.Node]:
    """Additions of a parameter."""
    return [
        node
        for node in draft.calls(aten.add.Tensor)
        if isinstance(node.args[1], fx.Node) and node.args[1].op == "get_attr"
    ]
