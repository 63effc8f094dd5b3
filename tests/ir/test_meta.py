"""Tests of metadata on graphs and nodes: origins, parameters and types."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import (
    Origin,
    Parameter,
    new_parameter,
    operand,
    origin_of,
    parameter_of,
    parameters,
    placement_of,
    set_parameter,
    type_of,
    value_type,
)
from tpcompile.ir.recipe import Slice, Tensor
from tpcompile.ir.types import REPLICATE, Shard, SymbolType, ValueType

W = Tensor("w", (6, 2))
ROWS = Layout("rows", 6, 1, even_runs(6, 4))


def test_where_a_node_comes_from() -> None:
    origin = Origin("model.layers.0.mlp", "/somewhere/modeling_qwen3.py", 81, 0)
    assert origin.place == "modeling_qwen3.py:81"
    assert str(origin) == "model.layers.0.mlp modeling_qwen3.py:81"
    assert str(Origin(file="a.py", line=3)) == "a.py:3"
    assert str(Origin("norm")) == "norm" and str(Origin()) == ""


def test_a_parameter_on_every_rank_and_in_parts() -> None:
    whole = Parameter.replicated(W, torch.bfloat16, 4)
    assert whole.type == ValueType((6, 2), torch.bfloat16)
    assert whole.shards == (W,) * 4
    split = whole.sharded(0, ROWS)
    assert split.type.placement == Shard(0, ROWS)
    assert split.shards == (
        Slice(W, 0, 0, 2),
        Slice(W, 0, 2, 4),
        Slice(W, 0, 4, 5),
        Slice(W, 0, 5, 6),
    )
    assert split.describe() == "w" and split.describe(3) == "w[5:6]"
    assert whole.type.placement == REPLICATE, "the original is unchanged"


def test_parameters_of_a_graph() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    first = new_parameter(gm.graph, "w", Parameter.replicated(W, torch.float32, 2), Origin("a"), gm)
    second = new_parameter(
        gm.graph, "w", Parameter.replicated(W, torch.float32, 2), Origin("b"), gm
    )
    assert (first.target, second.target) == ("w", "w_"), "names are unique"
    held = gm.get_parameter("w")
    assert held.is_meta and held.shape == (6, 2) and not held.requires_grad
    assert list(parameters(gm.graph)) == [first, second]
    assert str(origin_of(second)) == "b"
    split = parameter_of(first).sharded(0, Layout("rows", 6, 1, even_runs(6, 2)))
    set_parameter(first, split)
    assert parameter_of(first) is split
    assert placement_of(first) == split.type.placement
    assert value_type(second).placement == REPLICATE


def test_what_a_node_must_have() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    extent = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    extent.meta["type"] = SymbolType("T")
    assert operand(extent) is x and type_of(extent) == SymbolType("T")
    assert origin_of(x) == Origin()
    with pytest.raises(AssertionError, match="argument 1 of %sym_size_int must be a node, got 0"):
        operand(extent, 1)
    with pytest.raises(AssertionError, match="must be one tensor, got"):
        value_type(extent)


def test_what_a_graph_must_have() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    gm.meta["tpcompile"] = info = GraphInfo("name", 2, ())
    assert info_of(gm) is info and info.plan is None
