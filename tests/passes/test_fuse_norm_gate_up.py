"""Norm, gate, up and activation are fused into one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.decoding import decode_step
from tests.passes.graphs import GraphBuilder, nearest
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import (
    NORM_GATE_UP_SWIGLU,
    NORM_MLPS,
    NORM_MLPS_APART,
    RMS_NORM,
    SWIGLU,
    Activation,
)
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.passes.fuse_norm_gate_up import FuseNormGateUp
from tpcompile.rewriting.rewrite import calls
from tpcompile.vm.lowering.leftovers import leftovers

aten = torch.ops.aten
WIDTH, FFN = 6, 5


def _swiglu(builder: GraphBuilder, gate: fx.Node, up: fx.Node) -> fx.Node:
    return builder.call(SWIGLU, gate, up)


def mlp_graph(
    *,
    normed: bool = True,
    fused: bool = True,
    gated: bool = True,
    biased: bool = False,
    residual: str = "x",
    read: str = "",
    activate: Callable[..., fx.Node] = _swiglu,
) -> fx.GraphModule:
    """Return `residual + down(activate(gate, up))`; `read` names a value added to the result.

    Without a gate, only up is activated.
    """
    builder = GraphBuilder()
    x = builder.input("x", "T", WIDTH)
    values = {"x": x}
    values["n"] = (
        builder.call(RMS_NORM, x, builder.parameter("scale", WIDTH), 1e-6) if normed else x
    )
    sides = ("gate", "up") if gated else ("up",)
    for name in sides:
        values[name] = builder.linear(values["n"], name, FFN, WIDTH, biased)
    activated = activate(builder, *(values[name] for name in sides))
    down = builder.linear(activated, "down", WIDTH, FFN)
    result = builder.call(aten.add.Tensor, values[residual], down)
    if read:
        widened = builder.linear(values[read], "widened", WIDTH, FFN)
        result = builder.call(aten.add.Tensor, result, widened)
    gm = builder.done(result)
    if fused:
        assert FuseGateUp().apply(gm).matches == int(gated)
        assert check_graph(gm) == []
    return gm


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    current = decode_step("fuse-norm-gate-up", model).plain
    assert current.matches == 2
    assert not calls(current.after.graph, SWIGLU)


@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_comes_along(biased: bool) -> None:
    """A bias is fused, and the residual, which the norm reads too, is unchanged."""
    gm = mlp_graph(biased=biased)
    x, before = _numbers(gm)
    assert FuseNormGateUp().apply(gm).matches == 1
    assert check_graph(gm) == []
    (fused,) = calls(gm, NORM_GATE_UP_SWIGLU)
    assert len(fused.args) == 4 + biased
    gm.recompile()
    assert torch.equal(gm(x), before)


def _numbers(gm: fx.GraphModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a graph random parameters; return an input and the result."""
    for name, parameter in list(gm.named_parameters()):
        gm.register_parameter(
            name, torch.nn.Parameter(torch.randn(parameter.shape), requires_grad=False)
        )
    gm.recompile()
    x = torch.randn(3, WIDTH)
    return x, gm(x)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("biased", [False, True])
def test_gate_and_up_may_have_a_weight_each(biased: bool, activation: Activation) -> None:
    swiglu = activation is Activation.SILU
    changes: dict[str, Any] = {"fused": False, "biased": biased}
    gm = mlp_graph(**changes) if swiglu else _mlp_of((activation, True), **changes)
    x, before = _numbers(gm)
    assert FuseNormGateUp().apply(gm).matches == 1
    assert check_graph(gm) == []
    (fused,) = calls(gm, NORM_MLPS_APART[activation])
    assert len(fused.args) == (7 if biased else 5)
    gm.recompile()
    assert torch.equal(gm(x), before)


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "no norm": ({"normed": False}, "its input %x is not an RMS norm"),
    "the normed value is the residual": ({"residual": "n"}, "%add also reads it"),
    "the gate is read elsewhere": ({"read": "gate"}, "%linear_3 also reads it"),
    "up is read elsewhere": ({"read": "up"}, "%linear_3 also reads it"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = mlp_graph(**changes)
    before = len(gm.graph.nodes)
    assert reason in nearest(FuseNormGateUp().apply(gm))
    assert len(gm.graph.nodes) == before
    assert check_graph(gm) == []


def test_up_before_gate_is_left_alone() -> None:
    gm = mlp_graph(fused=True)
    (activated,) = calls(gm, SWIGLU)
    activated.args = activated.args[::-1]
    assert "expected 0, got 1" in nearest(FuseNormGateUp().apply(gm))


OTHERS = ["tanh", "written gelu"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("gated", [True, False])
def test_another_activation_is_refused_by_name(name: str, gated: bool) -> None:
    gm = mlp_of(KNOWN[name][0], gated=gated)
    FuseGateUp().apply(gm)
    reason = (
        f"the MLP's activation is aten.{KNOWN[name][1]}; "
        "programs support only silu, gelu, gelu_tanh, relu, relu2"
    )
    assert reason in nearest(FuseNormGateUp().apply(gm))
    left = {leftover.node.name: leftover for leftover in leftovers(gm)}
    assert KNOWN[name][1] in left
    assert all(reason in item.reason for item in left.values() if item.node.name != "down_weight")


FORMS = [form for form in NORM_MLPS if form != (Activation.SILU, True)]
"""Activations with and without a gate; SwiGLU is an op of its own."""


def _mlp_of(form: tuple[Activation, bool], **changes: Any) -> fx.GraphModule:
    """Return the graph of an MLP that calls the ops of its activation."""
    activation, gated = form

    def activate(builder: GraphBuilder, *projections: fx.Node) -> fx.Node:
        active = ACTIVATE[activation.name](builder, projections[0])
        return builder.call(aten.mul.Tensor, projections[1], active) if gated else active

    return mlp_graph(gated=gated, activate=activate, **changes)


ACTIVATE: dict[str, Callable[[GraphBuilder, fx.Node], fx.Node]] = {
    "SILU": KNOWN["silu"][0],
    "GELU": KNOWN["gelu"][0],
    "GELU_TANH": lambda builder, x: builder.call(aten.gelu.default, x, approximate="tanh"),
    "RELU": KNOWN["relu"][0],
    "RELU2": KNOWN["squared relu"][0],
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_other_activations_are_fused_too(form: tuple[Activation, bool]) -> None:
    """The activation determines the op; the numbers and the types stay the same."""
    gm = _mlp_of(form, biased=True)
    x, before = _numbers(gm)
    assert FuseNormGateUp().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, NORM_MLPS[form])[0].args) == 5
    gm.recompile()
    assert torch.equal(gm(x), before)


NEAR_MISSES_OF_OTHERS = {
    "no norm": ({"normed": False}, "its input %x is not an RMS norm"),
    "the projection is read elsewhere": ({"read": "up"}, "also reads it"),
}


@pytest.mark.parametrize("form", [(Activation.GELU, True), (Activation.RELU2, False)], ids=str)
@pytest.mark.parametrize("name", NEAR_MISSES_OF_OTHERS)
def test_a_near_miss_of_another_activation(name: str, form: tuple[Activation, bool]) -> None:
    """The reason is that of the form, not that the activation is unknown."""
    changes, reason = NEAR_MISSES_OF_OTHERS[name]
    gm = _mlp_of(form, **changes)
    assert reason in nearest(FuseNormGateUp().apply(gm))
    assert not any(calls(gm, target) for target in NORM_MLPS.values())


def test_an_activation_of_up_is_not_one_of_the_gate() -> None:
    """The gate is the projection that is activated, and its rows come first in the weight."""
    gm = _mlp_of((Activation.GELU, True))
    (product,) = [node for node in calls(gm, aten.mul.Tensor) if len(node.all_input_nodes) == 2]
    up, active = product.all_input_nodes
    gate = active.all_input_nodes[0]
    active.replace_input_with(gate, up)
    product.replace_input_with(up, gate)
    assert "expected 1, got 0" in nearest(FuseNormGateUp().apply(gm))
