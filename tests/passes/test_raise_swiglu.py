"""silu(gate) * up is recognised in either order; other activations are refused."""

from __future__ import annotations

import pytest

from tests.ir.test_activations import KNOWN, mlp_of
from tests.passes.graphs import refusal
from tests.passes.texts import assert_rewritten, graph_text
from tpcompile.ir.activations import activations
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import SWIGLU
from tpcompile.ir.parse import parse_graph
from tpcompile.passes.raise_swiglu import RaiseSwiglu
from tpcompile.rewriting.rewrite import calls

BEFORE = graph_text(
    """
    %gate = input : f32[T, 8] Replicate
    %up = input : f32[T, 8] Replicate
    %active = aten.silu(%gate) : f32[T, 8] Replicate
    %out = aten.mul(%active, %up) : f32[T, 8] Replicate
    """,
    "%out : f32[T, 8] Replicate",
)
AFTER = graph_text(
    """
    %gate = input : f32[T, 8] Replicate
    %up = input : f32[T, 8] Replicate
    %swiglu = tpc.swiglu(%gate, %up) : f32[T, 8] Replicate
    """,
    "%swiglu : f32[T, 8] Replicate",
)
NEAR_MISSES = {
    "expected aten.silu, got aten.gelu": ("aten.silu(%gate)", "aten.gelu(%gate)"),
    "expected aten.silu, got aten.relu": ("aten.silu(%gate)", "aten.relu(%gate)"),
    "expected aten.silu, got aten.neg": ("aten.silu(%gate)", "aten.neg(%gate)"),
    "gate and up must have the same shape": ("%up = input : f32[T, 8]", "%up = input : f32[T, 1]"),
    "expected aten.silu, got %gate": ("(%active, %up)", "(%gate, %up)"),
}


@pytest.mark.parametrize("factors", ["(%active, %up)", "(%up, %active)"])
def test_the_activated_operand_is_the_gate(factors: str) -> None:
    assert_rewritten(RaiseSwiglu(), BEFORE.replace("(%active, %up)", factors), AFTER)


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_near_miss_is_refused(reason: str) -> None:
    line, other = NEAR_MISSES[reason]
    assert BEFORE.count(line) == 1
    gm = parse_graph(BEFORE.replace(line, other))
    message = refusal(RaiseSwiglu(), gm)
    assert "There is no SwiGLU in the graph" in message
    assert reason in message
    assert not calls(gm, SWIGLU)


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
