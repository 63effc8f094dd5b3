"""silu(gate) * up is recognised in either order; other activations are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.graphs import GraphBuilder, refusal
from tests.passes.steps import step
from tpcompile.ir.activations import activations
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import SWIGLU
from tpcompile.ir.types import Dim, ValueType
from tpcompile.passes.raise_swiglu import RaiseSwiglu
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten


def mlp_graph(
    *, target: Any = aten.silu.default, up_first: bool = False, up: tuple[Dim, ...] = ("T", 8)
) -> fx.GraphModule:
    made = GraphBuilder()
    gate, other = made.input("gate", "T", 8), made.input("up", *up)
    active = made.call(target, gate, kind=ValueType(("T", 8), torch.float32))
    factors = (other, active) if up_first else (active, other)
    return made.done(made.call(aten.mul.Tensor, *factors))


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/raise_swiglu.txt", step("raise-swiglu").diff())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    assert step("raise-swiglu", model).matches == 2


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str) -> None:
    step("raise-swiglu", model).assert_same_bits()
    step("raise-swiglu", model).assert_near()


def test_again() -> None:
    assert step("raise-swiglu").again().matches == 0


@pytest.mark.parametrize("up_first", [False, True])
def test_the_activated_operand_is_the_gate(up_first: bool) -> None:
    gm = mlp_graph(up_first=up_first)
    gate, up = torch.randn(2, 3, 8).unbind()
    before = gm(gate, up)
    assert RaiseSwiglu().apply(gm).matches == 1
    assert check_graph(gm) == []
    (found,) = calls(gm, SWIGLU)
    assert [operand.name for operand in found.all_input_nodes] == ["gate", "up"]
    gm.recompile()
    assert torch.equal(gm(gate, up), before)


@pytest.mark.parametrize(
    "target", [aten.gelu.default, aten.relu.default, aten.sigmoid.default], ids=str
)
def test_another_activation_is_refused(target: Any) -> None:
    gm = mlp_graph(target=target)
    said = refusal(RaiseSwiglu(), gm)
    assert "There is no SwiGLU in the graph" in said
    assert "expected aten.silu, got " + f"{target}".removesuffix(".default") in said
    assert not calls(gm, SWIGLU)


def test_one_gate_for_all_features_is_refused() -> None:
    said = refusal(RaiseSwiglu(), mlp_graph(up=("T", 1)))
    assert "gate and up must have the same shape" in said


def test_a_gate_without_activation_is_refused() -> None:
    made = GraphBuilder()
    gate, up = made.input("gate", "T", 8), made.input("up", "T", 8)
    gm = made.done(made.call(aten.mul.Tensor, gate, up))
    assert "expected aten.silu, got %gate" in refusal(RaiseSwiglu(), gm)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_with_another_activation_stays_as_it_is(name: str, gated: bool) -> None:
    """Only silu(gate) * up becomes SwiGLU; other activations are unchanged."""
    gm = mlp_of(KNOWN[name][0], gated=gated)
    swiglu = name == "silu" and gated
    assert RaiseSwiglu().apply(gm).matches == int(swiglu)
    assert len(calls(gm, SWIGLU)) == int(swiglu)
    assert len(activations(gm.graph)) == int(not swiglu)
    assert check_graph(gm) == []
