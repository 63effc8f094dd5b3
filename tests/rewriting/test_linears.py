"""Tests of fusing parameters: name, recipes, and each rank's parts."""

from __future__ import annotations

import pytest
import torch

from tests.passes.graphs import GraphBuilder
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.layout import FusedLayout
from tpcompile.ir.meta import parameter_of, value_type
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.recipe import describe, shape_of
from tpcompile.rewriting.linears import fuse_linears, join_linears, joined_name
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import calls, drop_dead, drop_unused_parameters
from tpcompile.rewriting.structure import attention_blocks, weight_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["l0_q_proj_weight", "l0_k_proj_weight", "l0_v_proj_weight"], "l0_q_k_v_proj_weight"),
        (["l0_gate_proj_weight", "l0_up_proj_weight"], "l0_gate_up_proj_weight"),
        (["l0_q_proj_bias", "l0_k_proj_bias"], "l0_q_k_proj_bias"),
        (["query", "key"], "querykey"),
    ],
)
def test_joined_name(names: list[str], joined: str) -> None:
    assert joined_name(names) == joined


def test_fused_linears_give_what_they_gave() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 4)
    linears = [builder.linear(x, name, rows, 4, bias=True) for name, rows in (("a", 3), ("b", 5))]
    gm = builder.done(builder.call(aten.cat.default, linears, 1))
    weights = {name: torch.randn(p.shape) for name, p in gm.named_parameters()}
    value = torch.randn(6, 4)
    expected = torch.func.functional_call(gm, weights, (value,))
    fuse_linears(gm, linears)
    drop_dead(gm.graph)
    drop_unused_parameters(gm)
    assert check_graph(gm) == []
    gm.recompile()
    assert sorted(name for name, _ in gm.named_parameters()) == ["a_b_bias", "a_b_weight"]
    joined = {
        f"a_b_{kind}": torch.cat([weights[f"a_{kind}"], weights[f"b_{kind}"]])
        for kind in ("weight", "bias")
    }
    actual = torch.func.functional_call(gm, joined, (value,))
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_concatenation_of_linears_is_one_linear() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 4)
    linears = [builder.linear(x, name, rows, 4, bias=True) for name, rows in (("a", 3), ("b", 5))]
    whole = builder.call(aten.cat.default, linears, 1)
    gm = builder.done(builder.call(aten.neg.default, whole))
    weights = {name: torch.randn(p.shape) for name, p in gm.named_parameters()}
    value = torch.randn(6, 4)
    expected = torch.func.functional_call(gm, weights, (value,))
    join_linears(gm, whole)
    drop_dead(gm.graph)
    drop_unused_parameters(gm)
    assert check_graph(gm) == []
    assert len(calls(gm, LINEAR)) == 1 and not calls(gm, aten.cat.default)
    gm.recompile()
    joined = {
        f"a_b_{kind}": torch.cat([weights[f"a_{kind}"], weights[f"b_{kind}"]])
        for kind in ("weight", "bias")
    }
    actual = torch.func.functional_call(gm, joined, (value,))
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("one twice", "it has the same linear twice"),
        ("read elsewhere", "a node other than %cat reads it"),
        ("another input", "its input differs from that of %linear"),
    ],
)
def test_linears_that_cannot_be_joined(case: str, reason: str) -> None:
    builder = GraphBuilder()
    x, y = (builder.input(name, "T", 4) for name in "xy")
    a = builder.linear(x, "a", 3, 4)
    b = builder.linear(y if case == "another input" else x, "b", 3, 4)
    whole = builder.call(aten.cat.default, [a, a if case == "one twice" else b], 1)
    other = builder.call(aten.neg.default, a) if case == "read elsewhere" else x
    gm = builder.done(builder.call(aten.cat.default, [whole, other], 1))
    before = str(gm.graph)
    with pytest.raises(MissError, match=reason):
        join_linears(gm, whole)
    assert str(gm.graph) == before


def test_each_rank_joins_its_own_parts() -> None:
    """Trap 3: weights are split, then joined; a part is no slice of the joined weight."""
    before = attention_blocks(step("fuse-qkv").before.graph.graph)
    after = calls(step("fuse-qkv").after.graph, LINEAR)
    for block in before:
        linears = (block.query, block.key, block.value)
        parts = [parameter_of(weight_of(linear)) for linear in linears]
        name = describe(parts[0].whole)
        (fused,) = (
            parameter_of(weight_of(linear))
            for linear in after
            if describe(parameter_of(weight_of(linear)).whole).startswith(f"{name} ++")
        )
        for rank in range(4):
            assert fused.describe(rank) == " ++ ".join(part.describe(rank) for part in parts)
            assert shape_of(fused.shards[rank])[0] == sum(
                shape_of(part.shards[rank])[0] for part in parts
            )
        layout = fused.type.layout_of(0)
        assert isinstance(layout, FusedLayout)
        assert layout.segments == tuple(part.type.layout_of(0) for part in parts)


def test_the_split_behind_says_global_sizes() -> None:
    gm = step("fuse-qkv").after.graph
    for split in calls(gm, aten.split_with_sizes.default):
        assert split.args[1:] == ([96, 32, 32], 1)
        source = split.args[0]
        assert isinstance(source, torch.fx.Node)
        assert value_type(source).shape == ("T", 160)
