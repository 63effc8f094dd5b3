"""Tests of the rewriting primitives: replace, insert, drop, and the report."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder
from tpcompile.errors import PassError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import Origin, origin_of
from tpcompile.ir.ops import op_name
from tpcompile.rewriting.pattern import Bindings, Call, MissError, Value
from tpcompile.rewriting.rewrite import (
    Report,
    drop_dead,
    drop_unused_parameters,
    insert,
    insert_after,
    replace,
    rewrite,
)

aten = torch.ops.aten
NEG = aten.neg.default
TWICE = Call(NEG, (Call(NEG, (Value("x"),)),))


def _names(gm: fx.GraphModule) -> list[str]:
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def _negations(count: int) -> fx.GraphModule:
    builder = GraphBuilder()
    node = builder.input("x", "T", 4)
    for _ in range(count):
        node = builder.call(NEG, node)
    return builder.done(node)


def _silu(node: fx.Node, bindings: Bindings) -> fx.Node:
    return insert(node, aten.silu.default, bindings["x"])


def test_rewrite_replaces_every_match_and_drops_what_is_dead() -> None:
    gm = _negations(4)
    report = rewrite(gm, TWICE, _silu)
    assert check_graph(gm) == []
    assert report.matches == 2
    assert _names(gm) == ["aten.silu"] * 2


def test_a_replacement_that_refuses_leaves_the_graph() -> None:
    def refuse(node: fx.Node, bindings: Bindings) -> fx.Node:
        raise MissError(node, "not this one", 99)

    gm = _negations(2)
    report = rewrite(gm, TWICE, refuse)
    assert _names(gm) == ["aten.neg"] * 2
    assert str(report.nearest).endswith("not this one")


def test_the_nearest_miss_is_kept() -> None:
    report = Report()
    for reason, depth in (("far", 1), ("near", 3), ("as near", 3), ("off", 0)):
        report.miss(MissError(None, reason, depth))
    assert str(report.nearest) == "near"


def test_require_is_content_with_a_match_or_with_what_is_there() -> None:
    gm = _negations(1)
    assert Report(matches=1).require(gm, "thing").matches == 1
    assert Report().require(gm, "thing", NEG).matches == 0
    with pytest.raises(PassError, match="There is no thing in the graph") as refused:
        Report().require(gm, "thing", aten.silu.default)
    assert "at least one thing" in str(refused.value)


def test_new_nodes_keep_the_origin_of_what_they_stand_for() -> None:
    gm = _negations(1)
    (old,) = (node for node in gm.graph.nodes if node.op == "call_function")
    old.meta["origin"] = Origin("model.norm", "m.py", 3, 1)
    new = insert_after(old, aten.silu.default, old)
    assert origin_of(new) == origin_of(old)
    assert new.prev is old


def test_replace_spares_the_new_node() -> None:
    gm = _negations(2)
    first, second = (node for node in gm.graph.nodes if node.op == "call_function")
    new = insert_after(first, aten.silu.default, first)
    replace(first, new)
    assert new.args == (first,)
    assert second.args == (new,)


def test_inputs_outlive_their_readers_and_parameters_do_not() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 4)
    builder.linear(x, "unused", 4, 4)
    builder.input("unread", "S")
    gm = builder.done(builder.call(NEG, x))
    drop_dead(gm.graph)
    drop_unused_parameters(gm)
    assert _names(gm) == ["aten.neg"]
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == ["x", "unread"]
    assert list(gm.named_parameters()) == []
