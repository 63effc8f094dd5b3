"""Each redistribute becomes the collective that its operand's placement requires."""

from __future__ import annotations

import torch

from tests.passes.graphs import GraphBuilder
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, REDISTRIBUTE, op_name
from tpcompile.passes.insert_collectives import InsertCollectives
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten


def test_one_rank_needs_none() -> None:
    current = step("insert-collectives", tp=1)
    assert current.matches == 0
    assert not {ALL_REDUCE, ALL_GATHER} & {node.target for node in current.after.graph.graph.nodes}


def test_sums_are_reduced_and_logits_gathered() -> None:
    gm = step("insert-collectives").after.graph
    assert not calls(gm, REDISTRIBUTE)
    assert len(calls(gm, ALL_REDUCE)) == 2 * 2 + 1
    (gathered,) = calls(gm, ALL_GATHER)
    assert gathered.args[1] == 1


def test_a_value_that_is_whole_already_needs_nothing() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 4)
    doubled = builder.call(aten.add.Tensor, x, x)
    gm = builder.done(builder.call(REDISTRIBUTE, doubled))
    assert InsertCollectives().apply(gm).matches == 1
    assert [op_name(n) for n in gm.graph.nodes if n.op == "call_function"] == ["aten.add"]
    assert check_graph(gm) == []
