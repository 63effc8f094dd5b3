"""Gate and up are fused into one linear, gate first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, set_parameter
from tpcompile.ir.ops import LINEAR, SWIGLU
from tpcompile.ir.plan import plan_axis
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import mlp_blocks, weight_of


def mlp_graph(*, biased: str = "", up_input: str = "x", one: bool = False) -> fx.GraphModule:
    """Return a gated MLP; `biased` names projections with a bias, `one` uses the gate as up too."""
    made = GraphBuilder()
    inputs = {name: made.input(name, "T", 8) for name in dict.fromkeys(("x", up_input))}
    gate = made.linear(inputs["x"], "gate", 12, 8, bias="g" in biased)
    up = gate if one else made.linear(inputs[up_input], "up", 12, 8, bias="u" in biased)
    return made.done(made.linear(made.call(SWIGLU, gate, up), "down", 8, 12))


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_gate_up.txt", step("fuse-gate-up").diff())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    assert step("fuse-gate-up", model).matches == 2


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    step("fuse-gate-up", model, tp).assert_near()


def test_again() -> None:
    """A second run does not match, since gate and up are then outputs of a split."""
    assert "it is not computed by a linear" in nearest(step("fuse-gate-up").again())


@pytest.mark.parametrize("biased", ["", "gu"])
def test_one_linear_is_left_of_two(biased: str) -> None:
    gm = mlp_graph(biased=biased)
    assert FuseGateUp().apply(gm).matches == 1
    assert check_graph(gm) == []
    fused, down = calls(gm, LINEAR)
    assert parameter_of(weight_of(fused)).describe() == "gate.weight ++ up.weight"
    assert parameter_of(weight_of(down)).describe() == "down.weight"
    assert len(fused.args) == (3 if biased else 2)


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "gate is up": ({"one": True}, "gate and up are the same linear"),
    "up of another input": ({"up_input": "y"}, "its input differs from that of %linear"),
    "a bias on the gate alone": (
        {"biased": "g"},
        "it and %linear must both have a bias, or neither",
    ),
    "a bias on up alone": ({"biased": "u"}, "it and %linear must both have a bias, or neither"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = mlp_graph(**changes)
    before = len(gm.graph.nodes)
    assert reason in nearest(FuseGateUp().apply(gm))
    assert len(gm.graph.nodes) == before


@pytest.mark.parametrize("sharded", ["gate", "up"])
def test_one_sharded_and_one_not_is_left_alone(sharded: str) -> None:
    gm = mlp_graph()
    (mlp,) = mlp_blocks(gm.graph)
    weight = weight_of(getattr(mlp, sharded))
    set_parameter(weight, parameter_of(weight).sharded(0, plan_axis("ffn", 12, 2)))
    assert "it and %linear must both be sharded, or neither" in nearest(FuseGateUp().apply(gm))


def test_a_weight_used_twice_is_left_alone() -> None:
    made = GraphBuilder()
    x = made.input("x", "T", 8)
    gate = made.linear(x, "gate", 8, 8)
    up = made.linear(x, "up", 8, 8)
    again = made.call(LINEAR, made.call(SWIGLU, gate, up), gate.args[1])
    assert "its weight must be a parameter that no other node reads" in nearest(
        FuseGateUp().apply(made.done(again))
    )


def test_a_gate_that_is_no_linear_is_left_alone() -> None:
    made = GraphBuilder()
    x = made.input("x", "T", 8)
    gm = made.done(made.call(SWIGLU, x, made.linear(x, "up", 8, 8)))
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
