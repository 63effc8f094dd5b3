"""Gate and up are fused into one linear, gate first."""

from __future__ import annotations

import pytest

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.texts import applied, assert_left_alone, graph_text
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR, SWIGLU
from tpcompile.ir.parse import parse_graph
from tpcompile.ir.plan import plan_axis
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import mlp_blocks, weight_of

RESULT = "%down : f32[T, 8] Replicate"
BEFORE = graph_text(
    """
    %x = input : f32[T, 8] Replicate
    %y = input : f32[T, 8] Replicate
    %gate_weight = param(gate.weight) : f32[12, 8] Replicate
    %gate = aten.linear(%x, %gate_weight) : f32[T, 12] Replicate
    %up_weight = param(up.weight) : f32[12, 8] Replicate
    %up = aten.linear(%x, %up_weight) : f32[T, 12] Replicate
    %swiglu = tpc.swiglu(%gate, %up) : f32[T, 12] Replicate
    %down_weight = param(down.weight) : f32[8, 12] Replicate
    %down = aten.linear(%swiglu, %down_weight) : f32[T, 8] Replicate
    """,
    RESULT,
)
GATE, UP = "aten.linear(%x, %gate_weight)", "aten.linear(%x, %up_weight)"
UP_WEIGHT = "  %up_weight = param(up.weight) : f32[12, 8] Replicate\n"
UP_LINE = f"  %up = {UP} : f32[T, 12] Replicate\n"
UP_BIAS = "  %up_bias = param(up.bias) : f32[12] Replicate\n"
GATE_BIAS = "  %gate_bias = param(gate.bias) : f32[12] Replicate\n"
BIASED = {
    "  %gate = ": f"{GATE_BIAS}  %gate = ",
    GATE: "aten.linear(%x, %gate_weight, %gate_bias)",
    "  %up = ": f"{UP_BIAS}  %up = ",
    UP: "aten.linear(%x, %up_weight, %up_bias)",
}


def changed(changes: dict[str, str]) -> str:
    """Return the text with these parts changed."""
    text = BEFORE
    for part, other in changes.items():
        assert text.count(part) == 1
        text = text.replace(part, other)
    return text


@pytest.mark.parametrize("changes", [{}, BIASED], ids=["plain", "biased"])
def test_one_linear_is_left_of_two(changes: dict[str, str]) -> None:
    report, text = applied(FuseGateUp(), changed(changes))
    assert report.matches == 1
    assert text.count("aten.linear") == 2
    assert "param(gate.weight(12, 8) ++ up.weight(12, 8)) : f32[24, 8] Replicate" in text
    assert ("param(gate.bias(12) ++ up.bias(12))" in text) == bool(changes)


BIASES = "it and %gate must both have a bias, or neither"
NEAR_MISSES: dict[str, tuple[dict[str, str], str]] = {
    "gate is up": (
        {
            "(%gate, %up)": "(%gate, %gate)",
            UP_WEIGHT: "",
            f"  %up = {UP} : f32[T, 12] Replicate\n": "",
        },
        "gate and up are the same linear",
    ),
    "up of another input": (
        {UP: UP.replace("%x", "%y")},
        "its input differs from that of %gate",
    ),
    "a bias on the gate alone": (dict(list(BIASED.items())[:2]), BIASES),
    "a bias on up alone": (dict(list(BIASED.items())[2:]), BIASES),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    assert_left_alone(FuseGateUp(), changed(changes), reason)


@pytest.mark.parametrize("sharded", ["gate", "up"])
def test_one_sharded_and_one_not_is_left_alone(sharded: str) -> None:
    gm = parse_graph(BEFORE)
    (mlp,) = mlp_blocks(gm.graph)
    weight = weight_of(getattr(mlp, sharded))
    set_parameter(weight, parameter_of(weight).sharded(0, plan_axis("ffn", 12, 2)))
    assert "it and %gate must both be sharded, or neither" in nearest(FuseGateUp().apply(gm))


def test_a_weight_used_twice_is_left_alone() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 8)
    gate = builder.linear(x, "gate", 8, 8)
    up = builder.linear(x, "up", 8, 8)
    again = builder.call(LINEAR, builder.call(SWIGLU, gate, up), gate.args[1])
    assert "its weight must be a parameter that no other node reads" in nearest(
        FuseGateUp().apply(builder.done(again))
    )


def test_a_gate_that_is_no_linear_is_left_alone() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 8)
    gm = builder.done(builder.call(SWIGLU, x, builder.linear(x, "up", 8, 8)))
    assert "it is not computed by a linear" in nearest(FuseGateUp().apply(gm))


@pytest.mark.parametrize("name", KNOWN)
def test_another_activation_s_gate_and_up_are_fused_too(name: str) -> None:
    gm = mlp_of(KNOWN[name][0], up_first=True)
    assert FuseGateUp().apply(gm).matches == 1
    assert check_graph(gm) == []
    fused, _ = calls(gm, LINEAR)
    assert parameter_of(weight_of(fused)).describe() == "gate.weight ++ up.weight"
    assert "it is not computed by a linear" in nearest(FuseGateUp().apply(gm))


def test_an_mlp_without_a_gate_is_left_alone() -> None:
    gm = mlp_of(KNOWN["gelu"][0], gated=False)
    assert "its MLP has no gate" in nearest(FuseGateUp().apply(gm))
    assert len(calls(gm, LINEAR)) == 2
