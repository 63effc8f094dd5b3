"""MLPs with any activation, their projections and results are found by data flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder
from tpcompile.ir.activations import activations
from tpcompile.ir.ops import SWIGLU

aten = torch.ops.aten
Activate = Callable[[GraphBuilder, fx.Node], fx.Node]


def written_gelu(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """Write GELU as in `gelu_new`: eight ops around one tanh."""
    cube = builder.call(aten.mul.Tensor, builder.call(aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = builder.call(aten.mul.Tensor, builder.call(aten.add.Tensor, x, cube), 0.7978845608)
    outer = builder.call(aten.add.Tensor, builder.call(aten.tanh.default, inner), 1.0)
    return builder.call(aten.mul.Tensor, builder.call(aten.mul.Tensor, x, 0.5), outer)


def squared_relu(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    return builder.call(aten.square.default, builder.call(aten.relu.default, x))


def single(target: Any) -> Activate:
    return lambda builder, x: builder.call(target, x)


KNOWN: dict[str, tuple[Activate, str]] = {
    "gelu": (single(aten.gelu.default), "gelu"),
    "relu": (single(aten.relu.default), "relu"),
    "tanh": (single(aten.tanh.default), "tanh"),
    "silu": (single(aten.silu.default), "silu"),
    "sigmoid": (single(aten.sigmoid.default), "sigmoid"),
    "written gelu": (written_gelu, "tanh"),
    "squared relu": (squared_relu, "relu"),
}


def mlp_of(activate: Activate, *, gated: bool = True, up_first: bool = False) -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.input("x", "T", 8)
    names = ("gate", "up") if gated else ("up",)
    linears = [builder.linear(x, name, 12, 8) for name in names]
    active = activate(builder, linears[0])
    if gated:
        factors = (linears[1], active) if up_first else (active, linears[1])
        active = builder.call(aten.mul.Tensor, *factors)
    return builder.done(builder.linear(active, "down", 8, 12))


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_gated_mlp_has_its_gate_first(name: str, up_first: bool) -> None:
    activate, node = KNOWN[name]
    (activation,) = activations(mlp_of(activate, up_first=up_first).graph)
    weights = [projection.all_input_nodes[1].name for projection in activation.projections]
    assert weights == ["gate_weight", "up_weight"]
    assert activation.node.name == node
    assert [user.name for user in activation.result.users] == ["linear_2"]


@pytest.mark.parametrize("name", KNOWN)
def test_an_mlp_without_a_gate(name: str) -> None:
    activate, _ = KNOWN[name]
    (activation,) = activations(mlp_of(activate, gated=False).graph)
    assert [projection.name for projection in activation.projections] == ["linear"]


def test_swiglu_is_an_op_of_its_own() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 8)
    sides = (builder.linear(x, name, 12, 8) for name in ("gate", "up"))
    gm = builder.done(builder.linear(builder.call(SWIGLU, *sides), "down", 8, 12))
    assert activations(gm.graph) == []


def _no_down(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """Write an activation without a down projection, as a cap on logits has it."""
    return builder.call(aten.tanh.default, builder.linear(x, "up", 8, 8))


def _read_twice(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    active = builder.call(aten.gelu.default, builder.linear(x, "up", 8, 8))
    return builder.call(aten.add.Tensor, builder.linear(active, "down", 8, 8), active)


def _no_projection(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    active = builder.call(aten.gelu.default, x)
    product = builder.call(aten.mul.Tensor, active, builder.linear(x, "up", 8, 8))
    return builder.linear(product, "down", 8, 8)


def _a_scale_of_each_feature(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    active = builder.call(aten.gelu.default, builder.linear(x, "up", 8, 8))
    scaled = builder.call(aten.mul.Tensor, active, builder.parameter("scale", 8))
    return builder.linear(scaled, "down", 8, 8)


def _three_projections(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    first, second, third = (builder.linear(x, name, 8, 8) for name in "abc")
    product = builder.call(aten.mul.Tensor, builder.call(aten.relu.default, first), second)
    return builder.linear(builder.call(aten.mul.Tensor, product, third), "down", 8, 8)


@pytest.mark.parametrize(
    "write",
    [_no_down, _read_twice, _no_projection, _a_scale_of_each_feature, _three_projections],
)
def test_what_is_no_mlp(write: Activate) -> None:
    builder = GraphBuilder()
    gm = builder.done(write(builder, builder.input("x", "T", 8)))
    assert activations(gm.graph) == []


def test_values_that_meet_again_are_visited_once() -> None:
    """A value used twice is visited once; this chain has 2**60 paths."""
    builder = GraphBuilder()
    value = builder.call(aten.relu.default, builder.linear(builder.input("x", "T", 8), "up", 8, 8))
    for _ in range(60):
        value = builder.call(aten.mul.Tensor, value, value)
        value = builder.call(aten.add.Tensor, value, value)
    (activation,) = activations(builder.done(builder.linear(value, "down", 8, 8)).graph)
    assert activation.result is value
