"""Queries, keys and values are fused into one linear if their structure allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.graphs import GraphBuilder, attention_graph, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR, RMS_NORM
from tpcompile.ir.plan import plan_heads
from tpcompile.passes.fuse_qkv import FuseQkv
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import attention_blocks, weight_of

aten = torch.ops.aten


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_golden(model: str, golden: Callable[[str, str], None]) -> None:
    golden(f"passes/fuse_qkv_{model}.txt", step("fuse-qkv", model).diff())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    assert step("fuse-qkv", model).matches == 2


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    step("fuse-qkv", model, tp).assert_near()


def test_again() -> None:
    """A second run does not match, since heads then come from a split."""
    again = step("fuse-qkv").again()
    assert "the projection of its heads must be a separate linear" in nearest(again)


@pytest.mark.parametrize("biased", ["", "qkv"])
def test_one_linear_is_left_of_three(biased: str) -> None:
    gm = attention_graph(biased=biased)
    assert FuseQkv().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, LINEAR)) == 2
    left = [node.target for node in gm.graph.nodes if node.op == "get_attr"]
    assert left == ["q_k_v_weight", *(["q_k_v_bias"] if biased else []), "o_weight"]
    assert sorted(name for name, _ in gm.named_parameters()) == sorted(left)


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "keys of another input": (
        {"key_input": "y"},
        "its input differs from that of %linear",
    ),
    "a bias on queries alone": (
        {"biased": "q"},
        "it and %linear must both have a bias, or neither",
    ),
    "a bias on values alone": (
        {"biased": "v"},
        "it and %linear must both have a bias, or neither",
    ),
    "keys and values of one weight": (
        {"tied": True},
        "its weight must be a parameter that no other node reads",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = attention_graph(**changes)
    before = len(gm.graph.nodes)
    assert reason in nearest(FuseQkv().apply(gm))
    assert len(gm.graph.nodes) == before
    assert check_graph(gm) == []


def test_queries_sharded_and_keys_not_is_left_alone() -> None:
    """Sharded queries with replicated keys, as between shard-linears and kv-heads, do not match."""
    gm = clone(step("shard-linears").after.graph)
    reason = nearest(FuseQkv().apply(gm))
    assert "it and %" in reason
    assert "must both be sharded, or neither" in reason


def test_a_weight_split_by_columns_is_left_alone() -> None:
    gm = attention_graph()
    (block,) = attention_blocks(gm.graph)
    layout = plan_heads(4, 4, 2).queries.with_grain(4)
    for linear in (block.query, block.key, block.value):
        weight = weight_of(linear)
        set_parameter(weight, parameter_of(weight).sharded(1, layout))
    assert "its weight must be sharded by rows" in nearest(FuseQkv().apply(gm))


def test_heads_of_a_norm_over_the_width_are_left_alone() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    features = [builder.linear(x, name, 32, 16) for name in "qkv"]
    features[0] = builder.call(RMS_NORM, features[0], builder.parameter("scale", 32), 1e-6)
    mixed = builder.attention(*(builder.heads(part, 8) for part in features))
    merged = builder.call(aten.flatten.using_ints, mixed, 1, 2)
    gm = builder.done(builder.linear(merged, "o", 16, 32))
    assert "the projection of its heads is not a separate linear" in nearest(FuseQkv().apply(gm))


def test_a_graph_without_attention_has_nothing_to_fuse() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "T", 4), "w", 4, 4))
    report = FuseQkv().apply(gm)
    assert (report.matches, report.nearest) == (0, None)
