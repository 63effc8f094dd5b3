"""Mistakes in the use of the KV cache: other layers, blocks and spans."""

from __future__ import annotations

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, place_of
from tpcompile.ir.meta import operand, type_of
from tpcompile.ir.ops import (
    ATTENTION_REDUCE,
    CACHE_OPS,
    CACHE_WRITERS,
    NORM_QKV_ROPE_APPEND,
    PARTIAL_ATTENTION,
)
from tpcompile.rewriting.rewrite import insert, insert_item

aten = torch.ops.aten


def layer_read(draft: Draft) -> str:
    """Make one attention read the cache of another layer."""
    node = draft.pick(draft.calls(PARTIAL_ATTENTION), "reader of a cache")
    return _other_layer(node)


def layer_written(draft: Draft) -> str:
    """Make one layer write its keys and values to the cache of another layer."""
    return _other_layer(draft.pick(draft.calls(*CACHE_WRITERS), "writer of a cache"))


def layers_swapped(draft: Draft) -> str:
    """Swap the two layers in all writers or in all readers. Swapping both would be correct."""
    target = draft.pick([NORM_QKV_ROPE_APPEND, PARTIAL_ATTENTION], "side")
    nodes = draft.calls(target)
    draft.pick(nodes, "reader or writer of its own")
    for node in nodes:
        _other_layer(node)
    return f"{len(nodes)} nodes like %{nodes[0].name} with the layers swapped"


def _other_layer(node: fx.Node) -> str:
    place = place_of(node, "layer")
    layer = node.args[place]
    assert isinstance(layer, int)
    node.update_arg(place, 1 - layer)
    return f"%{node.name} uses layer {1 - layer} of the cache, not {layer}"


def block_of_reader(draft: Draft) -> str:
    return _other_block(draft, [draft.pick(draft.calls(PARTIAL_ATTENTION), "reader of a cache")])


def block_of_layer(draft: Draft) -> str:
    """Change the block size in all of a layer's ops with the cache."""
    nodes = draft.calls(*CACHE_OPS)
    node = draft.pick(nodes, "op with a cache")
    layer = node.args[place_of(node, "layer")]
    return _other_block(draft, [n for n in nodes if n.args[place_of(n, "layer")] == layer])


def _other_block(draft: Draft, nodes: list[fx.Node]) -> str:
    old = nodes[0].args[place_of(nodes[0], "block")]
    assert isinstance(old, int)
    new = draft.pick([old // 2, old * 2, old - 1], "block")
    for node in nodes:
        node.update_arg(place_of(node, "block"), new)
    return f"{', '.join(f'%{node.name}' for node in nodes)} with blocks of {new}, not {old}"


def queries_of_layer(draft: Draft) -> str:
    """Make a later layer attend with the queries of the first layer."""
    first, *later = draft.calls(PARTIAL_ATTENTION)
    node = draft.pick(later, "second reader of a cache")
    node.update_arg(0, operand(first))
    return f"%{node.name} attends with %{operand(first).name}"


def lse_of_another(draft: Draft) -> str:
    return _of_another(draft, 1)


def values_of_another(draft: Draft) -> str:
    return _of_another(draft, 0)


def both_of_another(draft: Draft) -> str:
    """Make the reduction of a later layer merge all spans of the first layer."""
    return _of_another(draft, 0, 1)


def _of_another(draft: Draft, *places: int) -> str:
    first, *later = draft.calls(ATTENTION_REDUCE)
    node = draft.pick(later, "second reduction")
    for place in places:
        node.update_arg(place, operand(first, place))
    return f"%{node.name} takes operands {list(places)} of %{first.name}"


def spans_left_out(draft: Draft) -> str:
    """Merge only the first span."""
    node = draft.pick(draft.calls(ATTENTION_REDUCE), "reduction")
    for place in (0, 1):
        source = operand(node, place)
        with draft.graph.inserting_before(node):
            first_span = insert(node, aten.slice.Tensor, source, 2, 0, 1, 1)
        first_span.meta["type"] = type_of(source)
        node.update_arg(place, first_span)
    return f"%{node.name} merges only the first span"


def lse_of_other_spans(draft: Draft) -> str:
    """Take the log-sum-exp from the same attention with another window, spans or scale."""
    node = draft.pick(draft.calls(ATTENTION_REDUCE), "reduction")
    partial = operand(operand(node))
    with draft.graph.inserting_before(node):
        attention = draft.graph.node_copy(partial)
        lse = insert_item(node, attention, 1, "lse")
    lse.meta["type"] = type_of(operand(node, 1))
    name, value = draft.pick([("window", 2), ("spans", 3), ("scale", 3.0)], "option")
    attention.update_arg(place_of(partial, name), value)
    node.update_arg(1, lse)
    return f"%{node.name} takes the lse with {name}={value}"
