"""Projections, heads and blocks are found by data flow; other structures are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.graphs import GraphBuilder, attention_graph
from tests.passes.steps import step
from tpcompile.errors import ShardingError
from tpcompile.ir.meta import parameter_of
from tpcompile.ir.ops import (
    DELTA_DECAY,
    EMBEDDING,
    GATED_DELTA_RULE,
    RMS_NORM,
    SPECS,
    SWIGLU,
    arguments_of,
)
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import insert
from tpcompile.rewriting.structure import (
    attention_blocks,
    bias_of,
    delta_blocks,
    embedding_of,
    head_of,
    head_ops,
    mlp_blocks,
    weight_of,
)

aten = torch.ops.aten


def test_blocks_of_a_real_model_have_their_own_weights() -> None:
    graph = step("raise-attention").after.graph.graph
    for layer, block in enumerate(attention_blocks(graph)):
        projections = (block.query, block.key, block.value, block.output)
        names = [parameter_of(weight_of(linear)).describe() for linear in projections]
        ahead = f"model.layers.{layer}.self_attn."
        assert names == [f"{ahead}{letter}_proj.weight" for letter in "qkvo"]
    for layer, mlp in enumerate(mlp_blocks(graph)):
        linears = (mlp.gate, mlp.up, mlp.down)
        names = [parameter_of(weight_of(linear)).describe() for linear in linears]
        ahead = f"model.layers.{layer}.mlp."
        assert names == [f"{ahead}{part}_proj.weight" for part in ("gate", "up", "down")]
    assert weight_of(head_of(graph)) is embedding_of(graph).args[0]  # tied


def test_blocks_are_found_after_sharding_too() -> None:
    graph = step("insert-collectives").after.graph.graph
    assert len(attention_blocks(graph)) == len(mlp_blocks(graph)) == 2
    assert weight_of(head_of(graph)) is embedding_of(graph).args[0]


def test_bias_is_found_where_there_is_one() -> None:
    (block,) = attention_blocks(attention_graph(biased="qv").graph)
    biases = [bias_of(linear) for linear in (block.query, block.key, block.value, block.output)]
    assert [bias and bias.target for bias in biases] == ["q_bias", None, "v_bias", None]


def test_head_ops_go_back_through_norm_and_rotation() -> None:
    (block,) = attention_blocks(step("raise-attention").after.graph.graph)[:1]
    query = block.attention.args[0]
    assert isinstance(query, fx.Node)
    chain = [str(node.target) for node in head_ops(query)]
    assert chain == ["tpc.rope.default", "tpc.rms_norm.default", "aten.unflatten.int"]


def _attention(builder: GraphBuilder, q: fx.Node) -> fx.Node:
    x = builder.input("z", "T", 16)
    k, v = (builder.heads(builder.linear(x, name, 32, 16), 8) for name in "kv")
    return builder.attention(q, k, v)


def test_heads_from_a_norm_over_the_whole_width_are_refused() -> None:
    """Norms over the full width, as in OLMo 2, are refused: heads would need all features."""
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    features = builder.linear(x, "q", 32, 16)
    normed = builder.call(RMS_NORM, features, builder.parameter("scale", 32), 1e-6)
    mixed = _attention(builder, builder.heads(normed, 8))
    merged = builder.call(aten.flatten.using_ints, mixed, 1, 2)
    gm = builder.done(builder.linear(merged, "o", 16, 32))
    with pytest.raises(ShardingError, match="the projection of its heads is not a") as refused:
        attention_blocks(gm.graph)
    assert "tpc.rms_norm(%linear, %scale, eps=1e-06)" in str(refused.value)


def test_attention_read_twice_is_refused() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    mixed = _attention(builder, builder.heads(builder.linear(x, "q", 32, 16), 8))
    merged = builder.call(aten.flatten.using_ints, mixed, 1, 2)
    out = builder.linear(merged, "o", 16, 32)
    other = builder.linear(merged, "p", 16, 32)
    gm = builder.done(builder.call(aten.add.Tensor, out, other))
    with pytest.raises(ShardingError, match="its result must go to exactly one linear") as refused:
        attention_blocks(gm.graph)
    assert f"aten.linear %{out.name}, aten.linear %{other.name}" in str(refused.value)


def test_attention_without_output_projection_is_refused() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    mixed = _attention(builder, builder.heads(builder.linear(x, "q", 32, 16), 8))
    gm = builder.done(builder.call(aten.neg.default, mixed))
    with pytest.raises(
        ShardingError, match=r"must go to exactly one aten\.flatten.*aten\.neg %neg"
    ):
        attention_blocks(gm.graph)


@pytest.mark.parametrize("computed", [(True, False), (False, True)])
def test_gate_or_up_from_no_linear_is_refused(computed: tuple[bool, bool]) -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    linears = [builder.linear(x, name, 16, 16) for name in ("gate", "up")]
    operands = [linear if whole else x for linear, whole in zip(linears, computed, strict=True)]
    gm = builder.done(builder.linear(builder.call(SWIGLU, *operands), "down", 16, 16))
    with pytest.raises(ShardingError, match="a projection must be a separate linear"):
        mlp_blocks(gm.graph)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_with_another_activation_has_the_same_parts(name: str, gated: bool) -> None:
    (block,) = mlp_blocks(mlp_of(KNOWN[name][0], gated=gated).graph)
    linears = {"gate": block.gate, "up": block.up, "down": block.down}
    names = {part: linear and weight_of(linear).name for part, linear in linears.items()}
    gate = "gate_weight" if gated else None
    assert names == {"gate": gate, "up": "up_weight", "down": "down_weight"}
    assert block.down.args[0] is block.activated


def test_two_embeddings_are_refused() -> None:
    builder = GraphBuilder()
    ids = builder.input("ids", "T", dtype=torch.int64)
    rows = [builder.call(EMBEDDING, builder.parameter(name, 9, 4), ids) for name in "ab"]
    gm = builder.done(builder.call(aten.add.Tensor, *rows))
    with pytest.raises(ShardingError, match="The graph has 2 embeddings"):
        embedding_of(gm.graph)


def test_logits_from_no_linear_are_refused() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.call(aten.neg.default, builder.input("x", "T", 4)))
    with pytest.raises(ShardingError, match="The logits do not come from a linear"):
        head_of(gm.graph)


def test_a_gated_delta_net_has_its_own_parts() -> None:
    for stage in ("raise-swiglu", "shard-linears"):
        gm = step(stage, "tiny-qwen3.5").after.graph
        blocks = delta_blocks(gm.graph)
        assert len(blocks) == 3
        for layer, block in enumerate(blocks):
            linears = (block.inputs, block.gate, block.a, block.beta, block.output)
            names = [weight_of(linear).name.removesuffix("_weight") for linear in linears]
            parts = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
            assert names == [f"l{layer}_{part}" for part in parts]
            assert block.rule.target is GATED_DELTA_RULE and block.decay.target is DELTA_DECAY


def _net(**changes: Any) -> fx.GraphModule:
    """Return a gated delta net of which some operand comes from elsewhere."""
    gm = clone(step("raise-swiglu", "tiny-qwen3.5").after.graph)
    rule = next(node for node in gm.graph.nodes if node.target is GATED_DELTA_RULE)
    for name, other in changes.items():
        bound = arguments_of(rule)
        place = SPECS[GATED_DELTA_RULE].argument_names.index(name)
        rule.update_arg(place, bound[other] if other in bound else other(gm, bound[name]))
    return gm


def _negated(gm: fx.GraphModule, value: fx.Node) -> fx.Node:
    with gm.graph.inserting_after(value):
        return insert(value, aten.neg.default, value)


NETS: dict[str, tuple[dict[str, Any], str]] = {
    "keys used as queries": ({"q": "k"}, "its channels must be one value split in three"),
    "negated values": ({"v": _negated}, "heads must be a result of aten.unflatten"),
    "negated decay": ({"decay": _negated}, "a decay must be a result of tpc.delta_decay"),
    "negated share": ({"beta": _negated}, "a share must be a result of aten.sigmoid"),
}


@pytest.mark.parametrize("name", NETS)
def test_a_gated_delta_net_of_other_parts_is_refused(name: str) -> None:
    changes, message = NETS[name]
    with pytest.raises(ShardingError, match=message) as refused:
        delta_blocks(_net(**changes).graph)
    assert "%l0_delta_rule" in str(refused.value)


def test_a_delta_net_without_a_gated_norm_is_refused() -> None:
    gm = _net()
    rule = next(node for node in gm.graph.nodes if node.target is GATED_DELTA_RULE)
    (norm,) = rule.users
    norm.update_arg(0, _negated(gm, rule))
    with pytest.raises(ShardingError, match=r"must go to exactly one tpc\.gated_rms_norm"):
        delta_blocks(gm.graph)


def test_an_output_gate_belongs_to_the_attention() -> None:
    """Its rows are the second parts of the heads of the query projection."""
    gm = step("raise-attention", "tiny-qwen3.5").after.graph
    (block,) = attention_blocks(gm.graph)
    assert block.gate is not block.query
    assert weight_of(block.query).name == "l3_q_proj_0_weight"
    assert block.gate is not None and weight_of(block.gate).name == "l3_q_proj_1_weight"
    (plain, _) = attention_blocks(step("raise-attention").after.graph.graph)
    assert plain.gate is None
