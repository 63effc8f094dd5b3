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
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU, RMS_NORM, SPECS, SWIGLU
from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.decode.norm_linear import SPLIT, check_gate_up, norm_linear
from tpcompile.passes.fuse_gate_up import FuseGateUp
from tpcompile.passes.fuse_norm_gate_up import FuseNormGateUp
from tpcompile.rewriting.rewrite import calls, fuse_calls
from tpcompile.vm.lowering.leftovers import leftovers

aten = torch.ops.aten
WIDTH, FFN = 6, 5


def _swiglu(made: GraphBuilder, gate: fx.Node, up: fx.Node) -> fx.Node:
    return made.call(SWIGLU, gate, up)


def mlp_graph(
    *,
    normed: bool = True,
    fused: bool = True,
    biased: bool = False,
    residual: str = "x",
    read: str = "",
    activate: Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node] = _swiglu,
) -> fx.GraphModule:
    """Return `residual + down(activate(gate, up))`; `read` names a value added to the result."""
    made = GraphBuilder()
    x = made.input("x", "T", WIDTH)
    values = {"x": x}
    values["n"] = made.call(RMS_NORM, x, made.parameter("scale", WIDTH), 1e-6) if normed else x
    for name in ("gate", "up"):
        values[name] = made.linear(values["n"], name, FFN, WIDTH, biased)
    activated = activate(made, values["gate"], values["up"])
    down = made.linear(activated, "down", WIDTH, FFN)
    result = made.call(aten.add.Tensor, values[residual], down)
    if read:
        widened = made.linear(values[read], "widened", WIDTH, FFN)
        result = made.call(aten.add.Tensor, result, widened)
    gm = made.done(result)
    if fused:
        assert FuseGateUp().apply(gm).matches == 1
        assert check_graph(gm) == []
    return gm


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_norm_gate_up.txt", decode_step("fuse-norm-gate-up").plain.diff())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    current = decode_step("fuse-norm-gate-up", model).plain
    assert current.matches == 2
    assert not calls(current.after.graph, SWIGLU)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    step = decode_step("fuse-norm-gate-up", model, tp)
    step.assert_same_bits()
    step.assert_near()


def test_again() -> None:
    assert decode_step("fuse-norm-gate-up").plain.again().matches == 0


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


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "no norm": ({"normed": False}, "its input %x is not an RMS norm"),
    "two linears": ({"fused": False}, "expected getitem, got aten.linear"),
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


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("gated", [True, False])
def test_another_activation_is_refused_by_name(name: str, gated: bool) -> None:
    gm = mlp_of(KNOWN[name][0], gated=gated)
    FuseGateUp().apply(gm)
    reason = f"the MLP's activation is aten.{KNOWN[name][1]}; programs support only silu(gate) * up"
    assert reason in nearest(FuseNormGateUp().apply(gm))
    left = {found.node.name: found for found in leftovers(gm)}
    assert KNOWN[name][1] in left
    assert all(reason in one.reason for one in left.values() if one.node.name != "down_weight")


def norm_gate_up_gelu(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute gelu(gate) · up of the normed rows: the body of SwiGLU with another activation."""
    rows = norm_linear(x, norm, eps, weight, bias)
    width = rows.shape[1] // 2
    parts = SPLIT(rows, [width, width], 1)
    gated: torch.Tensor = aten.gelu.default(parts[0], approximate="tanh") * parts[1]
    return gated


def test_another_activation_is_another_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that differs by one call gives the op, its type and the fusion that makes it."""
    target = composite(norm_gate_up_gelu, check=check_gate_up)
    monkeypatch.setitem(SPECS, target, SPECS.pop(target))  # forgotten after the test

    def gelu(made: GraphBuilder, gate: fx.Node, up: fx.Node) -> fx.Node:
        active = made.call(aten.gelu.default, gate, approximate="tanh")
        return made.call(aten.mul.Tensor, up, active)

    gm = mlp_graph(activate=gelu, biased=True)
    x, before = _numbers(gm)
    assert fuse_calls(gm, NORM_GATE_UP_SWIGLU).matches == 0
    assert fuse_calls(gm, target).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, target)[0].args) == 5
    gm.recompile()
    assert torch.equal(gm(x), before)
