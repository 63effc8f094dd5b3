"""RMS norm gives Hugging Face's bits and requires whole axes, as does the captured mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from tests.ir.ranks import operand, random, refused, run, sound_or_refused
from tests.ir.strategies import EXAMPLES, RANKS, layouts
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ADD_RMS_NORM, GATED_RMS_NORM, RMS_NORM

aten = torch.ops.aten
MEAN = aten.mean.dim
EPS = 1e-6
HEADS = Layout("heads", 4, 1, even_runs(4, 2))
WIDTH = Layout("width", 8, 1, even_runs(8, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (5, 6, 16), (1, 64)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_the_bits_are_hugging_face_s(shape: tuple[int, ...], eps: float, dtype: Any) -> None:
    x = random(*shape).whole.to(dtype) * 3
    theirs: Any = Qwen3RMSNorm(shape[-1], eps=eps).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(random(shape[-1], seed=1).whole)
        assert torch.equal(RMS_NORM(x, theirs.weight, eps), theirs(x))
        other = random(*shape, seed=2).whole.to(dtype)
        normed, total = ADD_RMS_NORM(x, other, theirs.weight, eps)
        assert torch.equal(total, x + other)
        assert torch.equal(normed, theirs(x + other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (5, 6, 16)], ids=str)
def test_the_bits_of_zero_centred_norms(shape: tuple[int, ...], dtype: Any) -> None:
    x = random(*shape).whole.to(dtype) * 3
    theirs: Any = Qwen3_5RMSNorm(shape[-1], eps=EPS).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(random(shape[-1], seed=1).whole)
        assert torch.equal(RMS_NORM(x, theirs.weight, EPS, True), theirs(x))
        other = random(*shape, seed=2).whole.to(dtype)
        normed, total = ADD_RMS_NORM(x, other, theirs.weight, EPS, True)
        assert torch.equal(total, x + other)
        assert torch.equal(normed, theirs(x + other))
        assert not torch.equal(RMS_NORM(x, theirs.weight, EPS), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide_weight", [False, True])
def test_the_bits_of_gated_norms(dtype: Any, wide_weight: bool) -> None:
    x, gate = (random(5, 6, 16, seed=seed).whole.to(dtype) for seed in range(2))
    theirs: Any = Qwen3_5RMSNormGated(16, eps=EPS).to(torch.float32 if wide_weight else dtype)
    with torch.no_grad():
        theirs.weight.copy_(random(16, seed=2).whole)
        assert torch.equal(GATED_RMS_NORM(x, gate, theirs.weight, EPS), theirs(x, gate))


@EXAMPLES
@given(st.data(), RANKS)
def test_gated_heads_on_ranks(data: st.DataObject, ranks: int) -> None:
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x, gate = (random(3, layout.size, 8, seed=seed).sharded(1, layout) for seed in range(2))
    run(GATED_RMS_NORM, x, gate, random(8, seed=2), EPS, ranks=ranks).assert_sound()


def test_refuses_gates_of_other_heads() -> None:
    weight, x = random(8, seed=1), random(3, 4, 8).sharded(1, HEADS)
    turned = Layout("heads", 4, 1, tuple(reversed(HEADS.parts)))
    for gate in (random(3, 4, 8), random(3, 4, 8).sharded(1, turned), random(3, 8)):
        refused("gated-norm", GATED_RMS_NORM, x, gate, weight, EPS)
    narrow = operand(x.whole.bfloat16()).sharded(1, HEADS)
    refused("gated-norm", GATED_RMS_NORM, x, narrow, weight, EPS)
    split = random(3, 4, 8).sharded(2, WIDTH)
    refused("norm-axis", GATED_RMS_NORM, split, split, weight, EPS)
    partial = random(3, 4, 8).partial()
    refused("partial-nonlinear", GATED_RMS_NORM, partial, partial, weight, EPS)


@EXAMPLES
@given(st.data(), RANKS)
def test_heads_on_ranks(data: st.DataObject, ranks: int) -> None:
    """A per-head norm does not depend on the rank that holds the head."""
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x = random(3, layout.size, 8).sharded(1, layout)
    run(RMS_NORM, x, random(8, seed=1), EPS, ranks=ranks).assert_sound()
    other = random(3, layout.size, 8, seed=2).sharded(1, layout)
    run(ADD_RMS_NORM, x, other, random(8, seed=1), EPS, ranks=ranks).assert_sound()
    run(RMS_NORM, x, random(8, seed=1), EPS, True, ranks=ranks).assert_sound()


@EXAMPLES
@given(st.integers(1, 9), RANKS, st.booleans())
def test_tokens_on_ranks_or_whole(tokens: int, ranks: int, split: bool) -> None:
    x, y = (random(tokens, 8, symbols=["T"], seed=seed) for seed in range(2))
    if split:
        x, y = x.sharded(0, TokenLayout(ranks)), y.sharded(0, TokenLayout(ranks))
    run(RMS_NORM, x, random(8, seed=3), EPS, ranks=ranks).assert_sound()
    run(ADD_RMS_NORM, x, y, random(8, seed=3), EPS, ranks=ranks).assert_sound()
    run(MEAN, x, [-1], True, ranks=ranks).assert_sound()


def test_refuses_a_split_axis() -> None:
    x, weight = random(3, 8), random(8, seed=1)
    error = refused("norm-axis", RMS_NORM, x.sharded(1, WIDTH), weight, EPS)
    assert "not the mean" in error.hint
    refused("norm-axis", RMS_NORM, x.sharded(1, WIDTH), weight.sharded(0, WIDTH), EPS)
    refused("norm-axis", ADD_RMS_NORM, x.sharded(1, WIDTH), x.sharded(1, WIDTH), weight, EPS)
    refused("norm-axis", MEAN, x.sharded(1, WIDTH), [-1], True)
    refused("norm-axis", MEAN, x.sharded(1, WIDTH), [0, 1], True)


def test_refuses_a_sum_not_taken() -> None:
    x, weight = random(3, 8), random(8, seed=1)
    refused("partial-nonlinear", RMS_NORM, x.partial(), weight, EPS)
    refused("partial-nonlinear", ADD_RMS_NORM, x, x.partial(), weight, EPS)
    refused("partial-nonlinear", ADD_RMS_NORM, x.partial(), x.partial(), weight, EPS)
    refused("partial-nonlinear", MEAN, x.partial(), [-1], True)


def test_refuses_a_weight_of_another_shape_or_place() -> None:
    x = random(3, 4, 8).sharded(1, HEADS)
    for weight in (random(4), random(1, 8), random(16)):
        refused("norm-weight", RMS_NORM, x, weight, EPS)
    refused("norm-weight", RMS_NORM, x, random(8).sharded(0, WIDTH), EPS)
    refused("norm-weight", RMS_NORM, x, random(8).partial(), EPS)


def test_refuses_terms_that_differ() -> None:
    weight = random(8, seed=1)
    refused("add-norm", ADD_RMS_NORM, random(3, 8), random(1, 8), weight, EPS)
    whole = random(4, 8, symbols=["T"])
    split = whole.sharded(0, TokenLayout(2))
    refused("same-layout", ADD_RMS_NORM, whole, split, weight, EPS)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_wide_weight_gives_what_hugging_face_gives(zero_centered: bool) -> None:
    """In Hugging Face bf16 times an fp32 weight is fp32; the type agrees, or the rule refuses."""
    x = operand(random(3, 8).whole.bfloat16())
    sound_or_refused(RMS_NORM, x, random(8, seed=1), EPS, zero_centered)
    sound_or_refused(ADD_RMS_NORM, x, x, random(8, seed=1), EPS, zero_centered)


@EXAMPLES
@given(st.data())
def test_means_are_those_of_torch(data: st.DataObject) -> None:
    x = random(2, 3, 4)
    dims = data.draw(
        st.sets(st.integers(-3, 2), min_size=1, max_size=2).filter(
            lambda drawn: len({d % 3 for d in drawn}) == len(drawn)
        )
    )
    run(MEAN, x, sorted(dims), True, ranks=2).assert_sound()


def test_refuses_a_mean_that_drops_dimensions() -> None:
    refused("mean", MEAN, random(3, 8), [-1], False)


@pytest.mark.parametrize("dims", [[], None], ids=str)
def test_a_mean_over_no_named_dimension_is_over_all(dims: Any) -> None:
    """Torch reduces all dimensions if none is named; the type agrees, or the rule refuses."""
    assert torch.mean(random(3, 8).whole, dims, keepdim=True).shape == (1, 1)
    sound_or_refused(MEAN, random(3, 8), dims, True)


def test_a_mean_of_another_dtype_has_it() -> None:
    sound_or_refused(MEAN, random(3, 8), [-1], True, dtype=torch.float64)


LAYER_NORM = aten.layer_norm.default


@EXAMPLES
@given(st.data(), RANKS)
def test_layer_norms_on_ranks(data: st.DataObject, ranks: int) -> None:
    """Rows and heads may be on several ranks, and a norm may have a scale and an offset."""
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x = random(3, layout.size, 8).sharded(1, layout)
    parameters = [random(8, seed=seed) if data.draw(st.booleans()) else None for seed in (1, 2)]
    run(LAYER_NORM, x, [8], *parameters, EPS, ranks=ranks).assert_sound(exact=True)


def test_layer_norms_need_the_whole_width_and_its_parameters() -> None:
    x, weight = random(3, 8), random(8, seed=1)
    refused("norm-axis", LAYER_NORM, x.sharded(1, WIDTH), [8], weight)
    refused("partial-nonlinear", LAYER_NORM, x.partial(), [8], weight)
    refused("layer-norm", LAYER_NORM, x, [3, 8], None)
    refused("layer-norm", LAYER_NORM, x, [4], None)
    for other in (
        weight.sharded(0, WIDTH),
        weight.partial(),
        random(4),
        operand(weight.whole.bfloat16()),
    ):
        refused("norm-weight", LAYER_NORM, x, [8], other)
        refused("norm-weight", LAYER_NORM, x, [8], weight, other)
