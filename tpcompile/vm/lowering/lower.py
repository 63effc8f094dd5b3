"""`lower`: each node of a decode graph to its instructions, by a table."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from tpcompile.ir import ops
from tpcompile.ir.info import info_of
from tpcompile.ir.leftovers import verify_nothing_left
from tpcompile.ir.meta import value_type
from tpcompile.vm.lowering import attention, head, residual
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.lowering.plan import Lowered, StepPlan

aten = torch.ops.aten


def lower(gm: fx.GraphModule, plan: StepPlan) -> Lowered:
    """The program of a graph that the decode pipeline made, before it is scheduled."""
    verify_nothing_left(gm)
    to = Building(gm, plan)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            _input(to, node)
        elif node.op == "call_function":
            handler = _HANDLERS.get(node.target)
            if handler is None:
                raise to.refusal(node, "the instruction set has nothing for it")
            handler(to, node)
    _check_ends(to)
    name = info_of(gm).name
    return Lowered(name, to.ranks, plan, tuple(to.buffers), tuple(to.instructions))


def _input(to: Building, node: fx.Node) -> None:
    if node.name == "input_ids":
        to.put(node, to.alike("tokens", (to.plan.batch,), torch.int32, "state"))


def _check_ends(to: Building) -> None:
    """A step that does not end in a token cannot begin the next one."""
    if not any(node.target == ops.ARGMAX for node in to.gm.graph.nodes):
        output = next(node for node in to.gm.graph.nodes if node.op == "output")
        raise to.refusal(output, "no token is chosen", "Put greedy-head into the pipeline")


def _same(to: Building, node: fx.Node) -> None:
    """A view: its value lies where that of its operand does."""
    to.put(node, to.where(node.all_input_nodes[0], 0))


def _side_by_side(to: Building, node: fx.Node) -> None:
    """Heads beside each other, as they lie."""
    source, first, last = node.args
    assert isinstance(source, fx.Node)
    if (first, last, value_type(source).dims) != (1, 2, 3):
        raise to.refusal(node, "a view that is not heads side by side")
    _same(to, node)


def _item(to: Building, node: fx.Node) -> None:
    """One of several results."""
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source.op == "call_module":
        return  # the tables of the rotation, by position
    first = to.where(source, 0)
    to.put(node, first + index * to.ranks)


def _rows(to: Building, node: fx.Node) -> None:
    """The rows wanted as logits: in a decode step those of all sequences, in their order."""
    _, dim, rows = node.args
    wanted = isinstance(rows, fx.Node) and rows.name == "logit_rows"
    if dim != 0 or not wanted:
        raise to.refusal(node, "rows that are not those wanted as logits")
    _same(to, node)


_HANDLERS: dict[object, Callable[[Building, fx.Node], None]] = {
    operator.getitem: _item,
    aten.flatten.using_ints: _side_by_side,
    aten.index_select.default: _rows,
    ops.ALL_GATHER: _same,  # logits stay where they are
    ops.EMBEDDING: residual.embedding,
    ops.VOCAB_EMBEDDING: residual.embedding,
    ops.ALL_REDUCE: residual.all_reduce,
    ops.LINEAR: residual.linear_terms,
    ops.NORM_QKV_ROPE_APPEND: attention.norm_qkv,
    ops.PARTIAL_ATTENTION: attention.partial_attention,
    ops.ATTENTION_REDUCE: attention.attention_reduce,
    ops.LINEAR_RESIDUAL: residual.linear_residual,
    ops.ALL_REDUCE_RESIDUAL: residual.all_reduce_residual,
    ops.NORM_GATE_UP_SWIGLU: head.norm_gate_up,
    ops.NORM_LINEAR: head.norm_head,
    ops.ARGMAX: head.argmax,
}
