"""The gates of linear attention and of attention are recognised; near misses are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import DELTA_DECAY, GATED_RMS_NORM, RMS_NORM, SIGMOID_GATE
from tpcompile.ir.types import SymbolType
from tpcompile.passes.raise_gates import RaiseGates
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
MODEL = "tiny-qwen3.5"
HEADS, WIDTH = 3, 4


def test_matches_every_gate() -> None:
    gm = step("raise-gates", MODEL).after.graph
    found = [len(calls(gm, op)) for op in (DELTA_DECAY, GATED_RMS_NORM, SIGMOID_GATE)]
    assert found == [3, 3, 1]
    assert step("raise-gates", "tiny-qwen3").matches == 0


def _applied(gm: fx.GraphModule, *operands: torch.Tensor, tokens: int = 5) -> torch.Tensor:
    gm.recompile()
    result: torch.Tensor = gm(*operands)
    return result


def decay_graph(
    *,
    dtype: torch.dtype = torch.float32,
    negated: bool = True,
    rate_is_input: bool = False,
    other_op: Any = aten.softplus.default,
    swapped: bool = False,
) -> fx.GraphModule:
    made = GraphBuilder()
    a = made.input("a", "T", HEADS, dtype=dtype)
    rate = (made.input if rate_is_input else made.parameter)("rate", HEADS)
    bias = made.parameter("bias", HEADS)
    wide = made.call(aten.to.dtype, a, torch.float32) if dtype != torch.float32 else a
    step = made.call(other_op, made.call(aten.add.Tensor, wide, bias))
    scale = made.call(aten.exp.default, rate)
    scale = made.call(aten.neg.default, scale) if negated else scale
    factors = (step, scale) if swapped else (scale, step)
    return made.done(made.call(aten.mul.Tensor, *factors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_decay(dtype: torch.dtype, swapped: bool) -> None:
    gm = decay_graph(dtype=dtype, swapped=swapped)
    for name in ("rate", "bias"):
        setattr(gm, name, torch.nn.Parameter(torch.randn(HEADS), requires_grad=False))
    a = torch.randn(5, HEADS).to(dtype)
    before = gm(a)
    assert RaiseGates().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, DELTA_DECAY)) == 1
    assert torch.equal(_applied(gm, a), before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate_is_input": True}, "its rate must be a parameter"),
        ({"negated": False}, ""),
        ({"other_op": aten.silu.default}, ""),
    ],
    ids=str,
)
def test_near_misses_of_a_decay(changes: dict[str, Any], said: str) -> None:
    gm = decay_graph(**changes)
    report = RaiseGates().apply(gm)
    assert report.matches == 0 and not calls(gm, DELTA_DECAY)
    assert said in str(report.nearest)


def norm_graph(
    *,
    dtype: torch.dtype = torch.float32,
    merged: bool = True,
    gate_dtype: torch.dtype | None = None,
    other_gate: bool = False,
) -> fx.GraphModule:
    """Return a norm per head with a gate, computed on heads that are merged with tokens."""
    made = GraphBuilder()
    x = made.input("x", "T", HEADS, WIDTH, dtype=dtype)
    gate = made.input("gate", "T", HEADS, WIDTH, dtype=gate_dtype or dtype)
    weight = made.parameter("weight", WIDTH, dtype=dtype)
    if merged:
        x, gate = (made.call(aten.reshape.default, each, [-1, WIDTH]) for each in (x, gate))
    normed = made.call(RMS_NORM, x, weight, 1e-6)
    wide = made.call(aten.to.dtype, gate, torch.float32)
    opened = made.call(aten.sigmoid.default if other_gate else aten.silu.default, wide)
    product = made.call(aten.mul.Tensor, normed, opened)
    rounded = made.call(aten.to.dtype, product, dtype)
    if not merged:
        return made.done(rounded)
    tokens = made.call(aten.sym_size.int, made.graph.find_nodes(op="placeholder")[0], 0)
    assert tokens.meta["type"] == SymbolType("T")
    return made.done(made.call(aten.reshape.default, rounded, [tokens, -1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm(dtype: torch.dtype) -> None:
    gm = norm_graph(dtype=dtype)
    gm.weight = torch.nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
    x, gate = (torch.randn(5, HEADS, WIDTH).to(dtype) for _ in range(2))
    before = gm(x, gate)
    assert RaiseGates().apply(gm).matches >= 1
    assert check_graph(gm) == []
    (norm,) = calls(gm, GATED_RMS_NORM)
    (user,) = norm.users
    assert user.target is aten.flatten.using_ints
    assert torch.equal(_applied(gm, x, gate), before)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merged": False}, "it merges no heads"),
        ({"gate_dtype": torch.bfloat16}, "the gate must have the type of the heads"),
        ({"other_gate": True}, ""),
    ],
    ids=str,
)
def test_near_misses_of_a_gated_norm(changes: dict[str, Any], said: str) -> None:
    gm = norm_graph(**changes)
    report = RaiseGates().apply(gm)
    assert not calls(gm, GATED_RMS_NORM)
    assert said in str(report.nearest)


@pytest.mark.parametrize("heads", [HEADS, 1])
def test_heads_that_are_merged_with_tokens_and_split_again(heads: int) -> None:
    """Qwen3-Next splits them before it merges the heads of a token. Other heads are left."""
    made = GraphBuilder()
    x = made.input("x", "T", HEADS, WIDTH)
    tokens = made.call(aten.sym_size.int, x, 0)
    merged = made.call(aten.reshape.default, x, [-1, WIDTH])
    split = [tokens, HEADS, WIDTH] if heads == HEADS else [tokens, 1, HEADS * WIDTH]
    again = made.call(aten.reshape.default, merged, split)
    gm = made.done(made.call(aten.neg.default, again))
    report = RaiseGates().apply(gm)
    assert check_graph(gm) == []
    assert report.matches == (heads == HEADS)
    assert len(calls(gm, aten.reshape.default)) == (0 if heads == HEADS else 2)


def test_the_activation_of_an_mlp_is_no_output_gate() -> None:
    """`up * sigmoid(gate)` between linears is an MLP."""
    for x_is_linear in (False, True):
        made = GraphBuilder()
        x, gate = (made.input(name, "T", 8) for name in ("x", "gate"))
        value = made.linear(x, "up", 8, 8) if x_is_linear else x
        opened = made.call(aten.sigmoid.default, gate)
        gm = made.done(made.call(aten.mul.Tensor, value, opened))
        report = RaiseGates().apply(gm)
        assert report.matches == int(not x_is_linear)
        assert check_graph(gm) == []


def test_an_output_gate_of_another_type_is_left() -> None:
    made = GraphBuilder()
    x, gate = made.input("x", "T", 8), made.input("gate", "T", 1)
    gm = made.done(made.call(aten.mul.Tensor, x, made.call(aten.sigmoid.default, gate)))
    report = RaiseGates().apply(gm)
    assert report.matches == 0
    assert "the gate must have the type of the value" in str(report.nearest)
