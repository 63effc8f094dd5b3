"""The lowering of a decode graph: its nodes become instructions, and its views aliases."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tpcompile.ir import ops
from tpcompile.ir.checker import verify_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import value_type
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.lowering.handlers import HANDLERS, lowers, read_by, reads
from tpcompile.vm.lowering.leftovers import verify_nothing_left
from tpcompile.vm.lowering.plan import Lowered, StepPlan
from tpcompile.vm.program import Role

aten = torch.ops.aten


def lower(gm: fx.GraphModule, plan: StepPlan) -> Lowered:
    """Lower a graph of the decode pipeline to a program that is not scheduled yet.

    Handlers rely on the rules of the graph, so one that was edited after the passes is refused.
    """
    verify_nothing_left(gm)
    verify_graph(gm)
    builder = Building(gm, plan)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            _input(builder, node)
        elif node.op.startswith("call"):
            HANDLERS[node.target].lower(builder, node)
    _check_ends(builder)
    name = info_of(gm).name
    return Lowered(name, builder.ranks, plan, tuple(builder.buffers), tuple(builder.instructions))


def _input(builder: Building, node: fx.Node) -> None:
    if node.name == "input_ids":
        builder.put(node, builder.sole(Role.TOKENS, (builder.plan.batch,)))


def _check_ends(builder: Building) -> None:
    """Raise if the step does not choose a token, which the next step needs as its input."""
    if not any(node.target == ops.ARGMAX for node in builder.gm.graph.nodes):
        output = next(node for node in builder.gm.graph.nodes if node.op == "output")
        raise builder.refusal(
            output, "the graph chooses no token", "Add greedy-head to the pipeline"
        )


@lowers(ops.ROTARY)
def _tables(builder: Building, node: fx.Node) -> None:
    """Emit nothing, because instructions read the rotation tables by position."""


@lowers(ops.ALL_GATHER, where=read_by())
def _alias(builder: Building, node: fx.Node) -> None:
    """Alias the operand's buffers. A gather for the output leaves its parts on their ranks."""
    builder.put(node, builder.buffer(node.all_input_nodes[0], 0))


@lowers(aten.flatten.using_ints, where=reads(ops.ATTENTION_REDUCE))
def _side_by_side(builder: Building, node: fx.Node) -> None:
    """Alias the heads, which are stored side by side already."""
    source, first, last = node.args
    assert isinstance(source, fx.Node)
    if (first, last, value_type(source).dims) != (1, 2, 3):
        raise builder.refusal(node, "the view does not put heads side by side")
    _alias(builder, node)


@lowers(operator.getitem, where=reads(ops.ROTARY, ops.PARTIAL_ATTENTION, ops.TOP_EXPERTS))
def _item(builder: Building, node: fx.Node) -> None:
    """Alias one of several results."""
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source.op == "call_module":
        return  # instructions read the rotation tables by position
    first = builder.buffer(source, 0)
    builder.put(node, first + index * builder.ranks)


@lowers(aten.index_select.default, where=read_by(ops.NORM_LINEAR))
def _rows(builder: Building, node: fx.Node) -> None:
    """Alias the rows requested as logits: in a decode step, the rows of all sequences in order."""
    _, dim, rows = node.args
    wanted = isinstance(rows, fx.Node) and rows.name == "logit_rows"
    if dim != 0 or not wanted:
        raise builder.refusal(node, "it does not select the rows requested as logits")
    _alias(builder, node)
