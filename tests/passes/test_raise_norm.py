"""RMS norms over the width and over heads are recognised; near misses are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder, refusal
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import RMS_NORM
from tpcompile.passes.raise_norm import RaiseNorm
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
WIDTH = 8


def norm_graph(
    *,
    dtype: torch.dtype = torch.float32,
    wide: bool = True,
    power: int = 2,
    dims: tuple[int, ...] = (-1,),
    other_value: bool = False,
    scale: tuple[int, ...] = (WIDTH,),
    scale_dtype: torch.dtype | None = None,
    scale_is_input: bool = False,
    swapped: bool = False,
) -> fx.GraphModule:
    """Return a norm as Hugging Face writes it, with the requested deviations."""
    builder = GraphBuilder()
    x = builder.input("x", "T", WIDTH, dtype=dtype)
    make: Any = builder.input if scale_is_input else builder.parameter
    weight = make("weight", *scale, dtype=scale_dtype or dtype)
    value = builder.call(aten.to.dtype, x, torch.float32) if wide else x
    normed = builder.call(aten.neg.default, value) if other_value else value
    square = builder.call(aten.pow.Tensor_Scalar, value, power)
    mean = builder.call(aten.mean.dim, square, list(dims), True)
    rsqrt = builder.call(aten.rsqrt.default, builder.call(aten.add.Tensor, mean, 1e-5))
    product = builder.call(aten.mul.Tensor, *((rsqrt, normed) if swapped else (normed, rsqrt)))
    back = builder.call(aten.to.dtype, product, dtype)
    return builder.done(
        builder.call(aten.mul.Tensor, *((back, weight) if swapped else (weight, back)))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_either_order_of_the_factors_and_any_dtype(dtype: torch.dtype, swapped: bool) -> None:
    gm = norm_graph(dtype=dtype, swapped=swapped)
    x = torch.randn(3, WIDTH).to(dtype)
    weight = torch.randn(WIDTH).to(dtype)
    gm.weight = torch.nn.Parameter(weight, requires_grad=False)
    before = gm(x)
    assert RaiseNorm().apply(gm).matches == 1
    assert check_graph(gm) == []
    (norm,) = calls(gm, RMS_NORM)
    assert norm.args[2] == 1e-5
    gm.recompile()
    assert torch.equal(gm(x), before)


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "mean over another dimension": ({"dims": (0,)}, "expected -1, got 0"),
    "mean over two dimensions": ({"dims": (0, -1)}, "expected a list of 1, got [0, -1]"),
    "cubes": ({"power": 3}, "expected 2, got 3"),
    "another value normed": ({"other_value": True}, "wide is already bound to"),
    "mean in fp16": (
        {"dtype": torch.float16, "wide": False},
        "the mean must be taken in fp32",
    ),
    "one scale for all": ({"scale": (1,)}, "the scale must have shape (8,), got (1,)"),
    "a scale per token and feature": (
        {"scale": (1, WIDTH)},
        "the scale must have shape (8,), got (1, 8)",
    ),
    "scale computed": ({"scale_is_input": True}, "the scale of a norm must be a parameter"),
    "result wider than x": (
        {"dtype": torch.bfloat16, "scale_dtype": torch.float32},
        "the result must have the dtype of x",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = norm_graph(**changes)
    message = refusal(RaiseNorm(), gm)
    assert reason in message
    assert "There is no RMS norm in the graph" in message
    assert not calls(gm, RMS_NORM)


def test_refusal_shows_the_line_that_came_nearest() -> None:
    message = refusal(RaiseNorm(), norm_graph(scale=(1,)))
    assert "%weight = param(weight) : f32[1] Replicate" in message


def test_nothing_like_it() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.call(aten.neg.default, builder.input("x", "T", 4)))
    assert "no candidate" in refusal(RaiseNorm(), gm)


def layer_norm_graph(
    dtype: torch.dtype, *, power: int = 2, own_mean: bool = True
) -> fx.GraphModule:
    """Return a layer norm as Cohere's models spell it out."""
    builder = GraphBuilder()
    x = builder.input("x", "T", WIDTH, dtype=dtype)
    weight = builder.parameter("weight", WIDTH, dtype=dtype)
    wide = builder.call(aten.to.dtype, x, torch.float32)
    mean = builder.call(
        aten.mean.dim, wide if own_mean else builder.call(aten.neg.default, wide), [-1], True
    )
    squares = builder.call(aten.pow.Tensor_Scalar, builder.call(aten.sub.Tensor, wide, mean), power)
    variance = builder.call(aten.mean.dim, squares, [-1], True)
    rsqrt = builder.call(aten.rsqrt.default, builder.call(aten.add.Tensor, variance, 1e-5))
    product = builder.call(aten.mul.Tensor, builder.call(aten.sub.Tensor, wide, mean), rsqrt)
    scale = builder.call(aten.to.dtype, weight, torch.float32)
    return builder.done(
        builder.call(aten.to.dtype, builder.call(aten.mul.Tensor, scale, product), dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_that_are_spelled_out(dtype: torch.dtype) -> None:
    gm = layer_norm_graph(dtype)
    x = torch.randn(3, WIDTH).to(dtype) + 2
    gm.weight = torch.nn.Parameter(torch.randn(WIDTH).to(dtype), requires_grad=False)
    before = gm(x)
    assert RaiseNorm().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, aten.layer_norm.default)) == 1
    gm.recompile()
    torch.testing.assert_close(gm(x), before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"power": 3}, "expected 2, got 3"),
        ({"own_mean": False}, "wide is already bound to"),
    ],
)
def test_near_misses_of_layer_norms(changes: dict[str, Any], reason: str) -> None:
    gm = layer_norm_graph(torch.float32, **changes)
    assert reason in refusal(RaiseNorm(), gm)
    assert not calls(gm, aten.layer_norm.default)
