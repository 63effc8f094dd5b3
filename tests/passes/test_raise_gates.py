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
    counts = [len(calls(gm, op)) for op in (DELTA_DECAY, GATED_RMS_NORM, SIGMOID_GATE)]
    assert counts == [3, 3, 1]
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
    builder = GraphBuilder()
    a = builder.input("a", "T", HEADS, dtype=dtype)
    rate = (builder.input if rate_is_input else builder.parameter)("rate", HEADS)
    bias = builder.parameter("bias", HEADS)
    wide = builder.call(aten.to.dtype, a, torch.float32) if dtype != torch.float32 else a
    step = builder.call(other_op, builder.call(aten.add.Tensor, wide, bias))
    scale = builder.call(aten.exp.default, rate)
    scale = builder.call(aten.neg.default, scale) if negated else scale
    factors = (step, scale) if swapped else (scale, step)
    return builder.done(builder.call(aten.mul.Tensor, *factors))


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
    ("changes", "reason"),
    [
        ({"rate_is_input": True}, "its rate must be a parameter"),
        ({"negated": False}, ""),
        ({"other_op": aten.silu.default}, ""),
    ],
    ids=str,
)
def test_near_misses_of_a_decay(changes: dict[str, Any], reason: str) -> None:
    gm = decay_graph(**changes)
    report = RaiseGates().apply(gm)
    assert report.matches == 0 and not calls(gm, DELTA_DECAY)
    assert reason in str(report.nearest)


def norm_graph(
    *,
    dtype: torch.dtype = torch.float32,
    merged: bool = True,
    gate_dtype: torch.dtype | None = None,
    other_gate: bool = False,
) -> fx.GraphModule:
    """Return a norm per head with a gate, computed on heads that are merged with tokens."""
    builder = GraphBuilder()
    x = builder.input("x", "T", HEADS, WIDTH, dtype=dtype)
    gate = builder.input("gate", "T", HEADS, WIDTH, dtype=gate_dtype or dtype)
    weight = builder.parameter("weight", WIDTH, dtype=dtype)
    if merged:
        x, gate = (builder.call(aten.reshape.default, value, [-1, WIDTH]) for value in (x, gate))
    normed = builder.call(RMS_NORM, x, weight, 1e-6)
    wide = builder.call(aten.to.dtype, gate, torch.float32)
    opened = builder.call(aten.sigmoid.default if other_gate else aten.silu.default, wide)
    product = builder.call(aten.mul.Tensor, normed, opened)
    rounded = builder.call(aten.to.dtype, product, dtype)
    if not merged:
        return builder.done(rounded)
    tokens = builder.call(aten.sym_size.int, builder.graph.find_nodes(op="placeholder")[0], 0)
    assert tokens.meta["type"] == SymbolType("T")
    return builder.done(builder.call(aten.reshape.default, rounded, [tokens, -1]))


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
    ("changes", "reason"),
    [
        ({"merged": False}, "it does not merge heads"),
        ({"gate_dtype": torch.bfloat16}, "the gate must have the type of the heads"),
        ({"other_gate": True}, ""),
    ],
    ids=str,
)
def test_near_misses_of_a_gated_norm(changes: dict[str, Any], reason: str) -> None:
    gm = norm_graph(**changes)
    report = RaiseGates().apply(gm)
    assert not calls(gm, GATED_RMS_NORM)
    assert reason in str(report.nearest)


@pytest.mark.parametrize("heads", [HEADS, 1])
def test_heads_that_are_merged_with_tokens_and_split_again(heads: int) -> None:
    """Qwen3-Next splits them before it merges the heads of a token. Other heads are left."""
    builder = GraphBuilder()
    x = builder.input("x", "T", HEADS, WIDTH)
    tokens = builder.call(aten.sym_size.int, x, 0)
    merged = builder.call(aten.reshape.default, x, [-1, WIDTH])
    split = [tokens, HEADS, WIDTH] if heads == HEADS else [tokens, 1, HEADS * WIDTH]
    again = builder.call(aten.reshape.default, merged, split)
    gm = builder.done(builder.call(aten.neg.default, again))
    report = RaiseGates().apply(gm)
    assert check_graph(gm) == []
    assert report.matches == (heads == HEADS)
    assert len(calls(gm, aten.reshape.default)) == (0 if heads == HEADS else 2)


def test_the_activation_of_an_mlp_is_no_output_gate() -> None:
    """`up * sigmoid(gate)` between linears is an MLP."""
    for x_is_linear in (False, True):
        builder = GraphBuilder()
        x, gate = (builder.input(name, "T", 8) for name in ("x", "gate"))
        value = builder.linear(x, "up", 8, 8) if x_is_linear else x
        opened = builder.call(aten.sigmoid.default, gate)
        gm = builder.done(builder.call(aten.mul.Tensor, value, opened))
        report = RaiseGates().apply(gm)
        assert report.matches == int(not x_is_linear)
        assert check_graph(gm) == []


def test_an_output_gate_of_another_type_is_left() -> None:
    builder = GraphBuilder()
    x, gate = builder.input("x", "T", 8), builder.input("gate", "T", 1)
    gm = builder.done(builder.call(aten.mul.Tensor, x, builder.call(aten.sigmoid.default, gate)))
    report = RaiseGates().apply(gm)
    assert report.matches == 0
    assert "the gate must have the type of the value" in str(report.nearest)
