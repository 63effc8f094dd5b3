"""Mistakes in collectives."""

from __future__ import annotations

import operator

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import (
    ADD_RMS_NORM,
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    REDUCE_SCATTER,
    RMS_NORM,
    VOCAB_EMBEDDING,
    op_name,
)
from tpcompile.rewriting.rewrite import insert, insert_after

aten = torch.ops.aten
_SUMS = (ALL_REDUCE, REDUCE_SCATTER)


def dropped(draft: Draft) -> str:
    node = draft.pick(draft.calls(*COLLECTIVES), "collective")
    node.replace_all_uses_with(operand(node))
    draft.graph.erase_node(node)
    return f"{op_name(node)} %{node.name} dropped"


def doubled(draft: Draft) -> str:
    """Run a collective twice.

    A gather whose rows are then selected is not doubled: the rows are in the first copy.
    """
    options = [
        node
        for node in draft.calls(*COLLECTIVES)
        if any(user.target is not aten.index_select.default for user in node.users)
        or node.target is not ALL_GATHER
    ]
    node = draft.pick(options, "collective")
    _again_behind(node, node)
    return f"{op_name(node)} %{node.name} run twice"


def past_nonlinear(draft: Draft) -> str:
    """Compute the sum of the norms instead of the norm of the sum.

    This is not done right after the embedding. There one rank has the row and the others have
    zeros, so the sum of the norms equals the norm of the sum.
    """
    node, reader = _read_sum(draft, RMS_NORM, ADD_RMS_NORM)
    if operand(node).target is VOCAB_EMBEDDING and reader.target is RMS_NORM:
        raise UnfitError("the terms of an embedding are rows or zeros")
    _move_past(node, reader)
    return f"{op_name(node)} %{node.name} moved past {op_name(reader)} %{reader.name}"


def past_residual(draft: Draft) -> str:
    """Add the residual on every rank before the sum, so that it counts tp times."""
    node, reader = _read_sum(draft, aten.add.Tensor)
    _move_past(node, reader)
    return f"{op_name(node)} %{node.name} moved past the addition %{reader.name}"


def mistaken(draft: Draft) -> str:
    """Replace a sum by a gather, or a gather by a sum."""
    node = draft.pick(draft.calls(*COLLECTIVES), "collective")
    arguments = () if node.target is ALL_GATHER else (draft.dice.randrange(2),)
    with draft.graph.inserting_before(node):
        target = ALL_REDUCE if node.target is ALL_GATHER else ALL_GATHER
        new = insert(node, target, node.args[0], *arguments)
    new.meta["type"] = node.meta["type"]
    node.replace_all_uses_with(new)
    draft.graph.erase_node(node)
    return f"{op_name(node)} %{node.name} became {op_name(new)}{list(arguments)}"


def gather_dim(draft: Draft) -> str:
    node = draft.pick(draft.calls(ALL_GATHER), "gather")
    node.update_arg(1, 1 - int(str(node.args[1])))
    return f"%{node.name} gathers along dimension {node.args[1]}"


def _read_sum(draft: Draft, *targets: object) -> tuple[fx.Node, fx.Node]:
    """Pick a sum and a reader of it. Readers that add a bias belong to another kind."""
    pairs = [
        (node, reader)
        for node in draft.calls(*_SUMS)
        for reader in node.users
        if reader.target in targets
        and (
            reader.target is not aten.add.Tensor
            or not any(source.op == "get_attr" for source in reader.all_input_nodes)
        )
    ]
    return draft.pick(pairs, "sum before such an op")


def _move_past(node: fx.Node, reader: fx.Node) -> None:
    reader.replace_input_with(node, operand(node))
    items = [user for user in reader.users if user.target is operator.getitem]
    for value in items or [reader]:
        _again_behind(value, node)
    if not node.users:
        node.graph.erase_node(node)


def _again_behind(value: fx.Node, collective: fx.Node) -> None:
    """Insert the same collective after `value`, and make the readers read its result."""
    new = insert_after(value, collective.target, value, *collective.args[1:])
    new.meta["type"] = value_type(collective)
    value.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
