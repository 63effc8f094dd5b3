"""Mistakes in the embedding and the head, which are split by vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError, shard_of
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import Parameter, operand, parameter_of, set_parameter, value_type
from tpcompile.ir.ops import EMBEDDING, LINEAR, VOCAB_EMBEDDING
from tpcompile.ir.recipe import Pad, shape_of
from tpcompile.rewriting.rewrite import insert, insert_after
from tpcompile.rewriting.structure import head_of

aten = torch.ops.aten


def plain_embedding(draft: Draft) -> str:
    """Look up ids of the whole vocabulary in a part of the table."""
    node = _embedding(draft)
    table, ids = node.args
    with draft.graph.inserting_before(node):
        _instead(node, insert(node, EMBEDDING, table, ids))
    return "plain embedding on a part of the table"


def plain_rows(draft: Draft) -> str:
    """Do the same with index_select, as in hand-written code."""
    node = _embedding(draft)
    table, ids = node.args
    with draft.graph.inserting_before(node):
        _instead(node, insert(node, aten.index_select.default, table, 0, ids))
    return "index_select on a part of the table"


def offset_given(draft: Draft) -> str:
    """Use one rank's first row on all ranks."""
    node = _embedding(draft)
    rank = draft.dice.randrange(1, draft.tp)
    first = _rows(node).intervals(rank)[0][0]
    node.args = (*node.args[:2], first)
    return f"first_row={first} on every rank"


def ids_clamped(draft: Draft) -> str:
    """Look up an end of the table for ids of other ranks, which should give zeros."""
    return _by_hand(draft, aten.clamp.default, lambda rows: (0, rows - 1))


def ids_wrapped(draft: Draft) -> str:
    """Look up some row for ids of other ranks, which should give zeros."""
    return _by_hand(draft, aten.remainder.Scalar, lambda rows: (rows,))


def _by_hand(draft: Draft, target: object, arguments: object) -> str:
    node = _embedding(draft)
    table, ids = node.args
    rows = min(_rows(node).extent(rank) for rank in range(draft.tp))
    with draft.graph.inserting_before(node):
        local = draft.graph.call_function(target, (ids, *arguments(rows)))  # type: ignore[operator, arg-type]
        local.meta["type"] = value_type(operand(node, 1))
        plain = draft.dice.random() < 0.5
        look_up = (
            insert(node, EMBEDDING, table, local)
            if plain
            else insert(node, aten.index_select.default, table, 0, local)
        )
        _instead(node, look_up)
    return f"ids by {target} into {rows} rows, {'embedding' if plain else 'index_select'}"


def padded_whole(draft: Draft) -> str:
    """Pad the head so that all ranks have the same number of rows, and do not cut the logits."""
    weight, size, padded = _head_weight(draft)
    layout = Layout("vocab", padded, 1, even_runs(padded, draft.tp))
    _set_padded(weight, size, padded, layout)
    return f"head padded from {size} to {padded} rows, logits uncut"


def padded_each(draft: Draft) -> str:
    """Pad the rows of every rank, but cut the logits as if all padding came last."""
    weight, size, padded = _head_weight(draft)
    layout = Layout("vocab", padded, 1, even_runs(padded, draft.tp))
    rows = padded // draft.tp
    unpadded = parameter_of(weight).shards
    _set_padded(weight, size, padded, layout)
    shards = tuple(
        Pad(recipe, 0, rows - shape_of(recipe)[0]) if shape_of(recipe)[0] < rows else recipe
        for recipe in unpadded
    )
    if shards[:-1] == unpadded[:-1]:
        raise UnfitError("only the last rank needs padding, which is correct")
    set_parameter(weight, replace(parameter_of(weight), shards=shards))
    output = next(node for node in draft.graph.nodes if node.op == "output")
    logits = operand(output)
    cut = insert_after(logits, aten.slice.Tensor, logits, 1, 0, size, 1)
    cut.meta["type"] = value_type(logits)
    output.replace_input_with(logits, cut)
    return f"head padded to {rows} rows per rank, logits cut at {size}"


def _head_weight(draft: Draft) -> tuple[fx.Node, int, int]:
    weight = operand(head_of(draft.graph), 1)
    size = int(value_type(weight).shape[0])
    return weight, size, size + draft.tp - size % draft.tp


def _set_padded(weight: fx.Node, size: int, padded: int, layout: Layout) -> None:
    parameter = parameter_of(weight)
    whole = Pad(parameter.whole, 0, padded - size)
    ranks = len(parameter.shards)
    set_parameter(
        weight, Parameter.replicated(whole, parameter.type.dtype, ranks).sharded(0, layout)
    )


def tied_twice(draft: Draft) -> str:
    """Give the head its own parameter, from the tensor that the embedding uses too."""
    head = head_of(draft.graph)
    weight = operand(head, 1)
    if len(weight.users) < 2:
        raise UnfitError("head and embedding are not tied")
    parameter = parameter_of(weight)
    size = int(value_type(weight).shape[0])
    layouts = {
        "in the same way": shard_of(weight).layout,
        "with the shorter runs first": _shorter_first(size, draft.tp),
        "in even elements": Layout("vocab_rows", size, 1, even_runs(size, draft.tp)),
    }
    description = draft.pick(layouts, "layout")
    layout = layouts[description]
    assert isinstance(layout, Layout)
    second = draft.new_parameter(head, "head_weight", parameter.sharded(0, layout))
    head.update_arg(1, second)
    return f"the tied tensor split again for the head, {description}"


def tied_other_dim(draft: Draft) -> str:
    """Give the head its own parameter, with the tied tensor split along the other dimension."""
    head = head_of(draft.graph)
    weight = operand(head, 1)
    if len(weight.users) < 2:
        raise UnfitError("head and embedding are not tied")
    width = int(value_type(weight).shape[1])
    layout = Layout("hidden", width, 1, even_runs(width, draft.tp))
    second = draft.new_parameter(head, "head_weight", parameter_of(weight).sharded(1, layout))
    head.update_arg(1, second)
    return "the tied tensor split along its width for the head"


def _shorter_first(size: int, tp: int) -> Layout:
    runs = even_runs(size, tp)
    parts = tuple(((size - stop, size - start),) for ((start, stop),) in reversed(runs))
    return Layout("vocab", size, 1, parts)


def _embedding(draft: Draft) -> fx.Node:
    return draft.pick(draft.calls(VOCAB_EMBEDDING), "split embedding")


def _rows(embedding: fx.Node) -> Layout:
    layout = shard_of(operand(embedding)).layout
    assert isinstance(layout, Layout)
    return layout


def _instead(old: fx.Node, new: fx.Node) -> None:
    new.meta["type"] = old.meta["type"]
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def token_offset_twice(draft: Draft) -> str:
    """Make the ids local before an op that makes them local itself."""
    node = _embedding(draft)
    first = _rows(node).intervals(draft.dice.randrange(1, draft.tp))[0][0]
    ids = operand(node, 1)
    with draft.graph.inserting_before(node):
        local = insert(node, aten.add.Tensor, ids, -first)
    local.meta["type"] = value_type(ids)
    node.update_arg(1, local)
    return f"{first} subtracted from the ids before the split embedding"


def head_untied(draft: Draft) -> str:
    """Make the head read the embedding's tensor, though the model has a separate one."""
    head = head_of(draft.graph)
    table = operand(_embedding(draft))
    weight = operand(head, 1)
    if head.target is not LINEAR or weight is table:
        raise UnfitError("head and embedding are tied")
    head.update_arg(1, table)
    return "the head uses the embedding's table"
