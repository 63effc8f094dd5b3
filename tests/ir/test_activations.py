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
Made = GraphBuilder
Activate = Callable[[Made, fx.Node], fx.Node]


def written_gelu(made: Made, x: fx.Node) -> fx.Node:
    """Write GELU as in `gelu_new`: eight ops around one tanh."""
    cube = made.call(aten.mul.Tensor, made.call(aten.pow.Tensor_Scalar, x, 3.0), 0.044715)
    inner = made.call(aten.mul.Tensor, made.call(aten.add.Tensor, x, cube), 0.7978845608)
    outer = made.call(aten.add.Tensor, made.call(aten.tanh.default, inner), 1.0)
    return made.call(aten.mul.Tensor, made.call(aten.mul.Tensor, x, 0.5), outer)


def squared_relu(made: Made, x: fx.Node) -> fx.Node:
    return made.call(aten.square.default, made.call(aten.relu.default, x))


def single(target: Any) -> Activate:
    return lambda made, x: made.call(target, x)


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
    made = GraphBuilder()
    x = made.input("x", "T", 8)
    names = ("gate", "up") if gated else ("up",)
    linears = [made.linear(x, name, 12, 8) for name in names]
    active = activate(made, linears[0])
    if gated:
        factors = (linears[1], active) if up_first else (active, linears[1])
        active = made.call(aten.mul.Tensor, *factors)
    return made.done(made.linear(active, "down", 8, 12))


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_gated_mlp_has_its_gate_first(name: str, up_first: bool) -> None:
    activate, node = KNOWN[name]
    (found,) = activations(mlp_of(activate, up_first=up_first).graph)
    weights = [projection.all_input_nodes[1].name for projection in found.projections]
    assert weights == ["gate_weight", "up_weight"]
    assert found.node.name == node
    assert [user.name for user in found.result.users] == ["linear_2"]


@pytest.mark.parametrize("name", KNOWN)
def test_an_mlp_without_a_gate(name: str) -> None:
    activate, _ = KNOWN[name]
    (found,) = activations(mlp_of(activate, gated=False).graph)
    assert [projection.name for projection in found.projections] == ["linear"]


def test_swiglu_is_an_op_of_its_own() -> None:
    made = GraphBuilder()
    x = made.input("x", "T", 8)
    sides = (made.linear(x, name, 12, 8) for name in ("gate", "up"))
    gm = made.done(made.linear(made.call(SWIGLU, *sides), "down", 8, 12))
    assert activations(gm.graph) == []


def _no_down(made: Made, x: fx.Node) -> fx.Node:
    """Write an activation without a down projection, as a cap on logits has it."""
    return made.call(aten.tanh.default, made.linear(x, "up", 8, 8))


def _read_twice(made: Made, x: fx.Node) -> fx.Node:
    active = made.call(aten.gelu.default, made.linear(x, "up", 8, 8))
    return made.call(aten.add.Tensor, made.linear(active, "down", 8, 8), active)


def _no_projection(made: Made, x: fx.Node) -> fx.Node:
    active = made.call(aten.gelu.default, x)
    product = made.call(aten.mul.Tensor, active, made.linear(x, "up", 8, 8))
    return made.linear(product, "down", 8, 8)


def _a_scale_of_each_feature(made: Made, x: fx.Node) -> fx.Node:
    active = made.call(aten.gelu.default, made.linear(x, "up", 8, 8))
    scaled = made.call(aten.mul.Tensor, active, made.parameter("scale", 8))
    return made.linear(scaled, "down", 8, 8)


def _three_projections(made: Made, x: fx.Node) -> fx.Node:
    first, second, third = (made.linear(x, name, 8, 8) for name in "abc")
    product = made.call(aten.mul.Tensor, made.call(aten.relu.default, first), second)
    return made.linear(made.call(aten.mul.Tensor, product, third), "down", 8, 8)


@pytest.mark.parametrize(
    "write",
    [_no_down, _read_twice, _no_projection, _a_scale_of_each_feature, _three_projections],
)
def test_what_is_no_mlp(write: Activate) -> None:
    made = GraphBuilder()
    gm = made.done(write(made, made.input("x", "T", 8)))
    assert activations(gm.graph) == []


def test_values_that_meet_again_are_visited_once() -> None:
    """A value used twice is visited once; this chain has 2**60 paths."""
    made = GraphBuilder()
    value = made.call(aten.relu.default, made.linear(made.input("x", "T", 8), "up", 8, 8))
    for _ in range(60):
        value = made.call(aten.mul.Tensor, value, value)
        value = made.call(aten.add.Tensor, value, value)
    (found,) = activations(made.done(made.linear(value, "down", 8, 8)).graph)
    assert found.result is value
