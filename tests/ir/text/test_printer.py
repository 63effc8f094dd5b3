"""The text form matches a golden that covers all parts of a type, whole and for one rank."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from tpcompile.ir.checker import verify_graph
from tpcompile.ir.info import GraphInfo
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.ops import ALL_GATHER, LINEAR, REDUCE_SCATTER, RMS_NORM, TABLES
from tpcompile.ir.recipe import Concat, Tensor
from tpcompile.ir.text import format_graph, format_node, format_type
from tpcompile.ir.types import SymbolType, ValueType

aten = torch.ops.aten

HEADS = Layout("q_heads", 3, 4, even_runs(3, 2))
KEYS = Layout("kv_heads", 1, 4, (((0, 1),), ((0, 1),)))
HIDDEN = ValueType(("T", 8), torch.float32)


def small_graph() -> fx.GraphModule:
    """Return a graph of uneven fused rows, a reduce-scatter over tokens, a norm and a gather."""
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    graph, file = gm.graph, "/somewhere/modeling_small.py"
    origins = [
        Origin("embed", file, 7),
        Origin("layers.0.attn", file, 12, 0),
        Origin("norm", file, 30),
    ]

    def parameter(name: str, whole: Parameter, where: Origin) -> fx.Node:
        return new_parameter(graph, name, whole, where, gm)

    def call(where: Origin, target: object, *args: object) -> fx.Node:
        node = graph.create_node("call_function", target, args)  # type: ignore[arg-type]
        node.meta["origin"] = where
        return node

    x = graph.placeholder("x")
    x.meta["type"] = HIDDEN
    cast = call(origins[0], aten.to.dtype, x, torch.bfloat16)
    wide = call(origins[0], aten.to.dtype, cast, torch.float32)
    fused = Concat((Tensor("q.weight", (12, 8)), Tensor("k.weight", (4, 8))), 0)
    rows = Parameter.replicated(fused, torch.float32, 2).sharded(0, FusedLayout((HEADS, KEYS)))
    projected = call(origins[1], LINEAR, wide, parameter("qk", rows, origins[1]))
    split = call(origins[1], aten.split_with_sizes.default, projected, [12, 4], 1)
    query = graph.call_function(operator.getitem, (split, 0))
    query.meta["origin"] = origins[1]
    columns = Parameter.replicated(Tensor("o.weight", (8, 12)), torch.float32, 2)
    out = call(origins[1], LINEAR, query, parameter("o", columns.sharded(1, HEADS), origins[1]))
    scattered = call(origins[1], REDUCE_SCATTER, out, 2)
    scale = Parameter.replicated(Tensor("norm.weight", (8,)), torch.float32, 2)
    normed = call(origins[2], RMS_NORM, scattered, parameter("scale", scale, origins[2]), 1e-6)
    whole = call(origins[2], ALL_GATHER, normed, 0)
    graph.output(whole)
    gm.meta["tpcompile"] = GraphInfo("small", 2, (HIDDEN,))
    verify_graph(gm)
    return gm


def test_a_graph_on_all_ranks(golden: Callable[[str, str], None]) -> None:
    golden("ir/small.txt", format_graph(small_graph()))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_graph_as_one_rank_has_it(golden: Callable[[str, str], None], rank: int) -> None:
    golden(f"ir/small-rank{rank}.txt", format_graph(small_graph(), rank))


def test_types_show_local_extents_beside_global_ones() -> None:
    x = ValueType(("T", 12), torch.bfloat16)
    assert format_type(x) == "bf16[T, 12] Replicate"
    assert format_type(x.sharded(1, HEADS)) == "bf16[T, 12:8|4] Shard(1, q_heads)"
    even = Layout("ffn", 12, 1, even_runs(12, 4))
    assert format_type(x.sharded(1, even)) == "bf16[T, 12:4×3] Shard(1, ffn)"
    assert format_type(x.sharded(0, TokenLayout(2))) == "bf16[T:2×T/2, 12] Shard(0, tokens)"
    assert format_type(x.sharded(1, HEADS), rank=1) == "bf16[T, 4] Shard(1, q_heads)"
    assert format_type(x.sharded(0, TokenLayout(2)), rank=1) == "bf16[T/2, 12] Shard(0, tokens)"
    assert format_type((x, x), rank=0) == "(bf16[T, 12] Replicate, bf16[T, 12] Replicate)"
    assert format_type(SymbolType("T")) == "int T"


def test_nodes_without_type_or_parameter_can_be_shown() -> None:
    """Nodes without type or parameter can be printed, since error messages show invalid graphs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("w")
    unknown = graph.call_function(aten.sigmoid.default, (x,))
    tables = graph.call_function(TABLES, (x, 16, torch.bfloat16))
    result = graph.output((unknown, None))
    assert format_node(x) == "%x = input : ?"
    assert format_node(weight) == "%w = param(?) : ?"
    assert format_node(unknown) == "%sigmoid_default = aten.sigmoid(%x) : ?"
    assert format_node(tables).endswith("= tpc.rotary(%x, width=16, dtype=bf16) : ?")
    assert format_node(result) == "return [%sigmoid_default, None]"


def test_arguments_with_values_inside_are_shown_without_their_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    joined = graph.call_function(aten.cat.default, ([x, x], 1))
    cast = graph.call_function(aten.to.dtype, (x,), {"dtype": torch.float32})
    assert format_node(joined) == "%cat_default = aten.cat([%x, %x], dim=1) : ?"
    assert format_node(cast) == "%to_dtype = aten.to(%x, dtype=f32) : ?"
