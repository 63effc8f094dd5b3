"""Trap 6: the bias of a projection summed across ranks is added once, after the sum."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.models import TOLERANCE, Pair, batch, eager_logits, pair_of, relative_error, stage_logits
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.test_fuse_norm_linear import numbered
from tests.passes.test_shard_linears import biased_llama
from tests.stages import graph_after, stages_of
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_REDUCE, ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL, arguments_of
from tpcompile.ir.types import PARTIAL
from tpcompile.passes import decode_pipeline, run_passes
from tpcompile.passes.fuse_residual import FuseResidual
from tpcompile.presets import preset
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
WIDTH = 6


@lru_cache(maxsize=1)
def biased_qwen3() -> Pair:
    """Return a Qwen3 with biases in all linears of its attention, including the output."""
    return pair_of(AutoConfig.for_model(**{**preset("tiny-qwen3"), "attention_bias": True}))


BIASED = {"qwen3": (biased_qwen3, 2), "llama": (biased_llama, 4)}
"""Models, and how many of their four projections into the residual have a bias."""


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_goes_along_and_counts_once(name: str, tp: int) -> None:
    """Trap 6: on one rank the projection adds the bias, on several the all-reduce does, once."""
    make, expected = BIASED[name]
    pair = make()
    stages = stages_of(pair, decode_pipeline(tp))
    gm = stages[-1].graph
    assert stages[-1].stats.matches == 4
    assert not calls(gm, aten.add.Tensor)
    target = LINEAR_RESIDUAL if tp == 1 else ALL_REDUCE_RESIDUAL
    bound = [arguments_of(node) for node in calls(gm, target)]
    assert len(bound) == 4
    assert sum(arguments["bias"] is not None for arguments in bound) == expected
    packed = batch((1, 1, 1), pair.eager.config.vocab_size)
    eager = eager_logits(pair.eager, (1, 1, 1))
    for logits in stages[-1].run(pair.read, **packed.inputs()):
        assert relative_error(logits, eager) < TOLERANCE


def test_a_bias_on_every_rank_is_refused_and_wrong() -> None:
    """Trap 6 put back: a bias added to each rank's terms is counted tp times."""
    pair = biased_qwen3()
    gm = graph_after(pair, decode_pipeline(2))
    for node in calls(gm, ALL_REDUCE_RESIDUAL):
        if len(node.args) == 3:
            partial, residual, bias = (operand(node, place) for place in range(3))
            partial.prepend(bias)
            partial.args = (*partial.args[:2], bias)
            node.args = (partial, residual)
    assert {problem.rule for problem in check_graph(gm)} == {"bias-once"}
    packed = batch((1, 1, 1), pair.eager.config.vocab_size)
    logits = stage_logits(gm, pair, packed)
    assert relative_error(logits, eager_logits(pair.eager, (1, 1, 1))) > 100 * TOLERANCE


@pytest.mark.parametrize("tp", [2, 3])
def test_a_bias_is_added_before_a_sum_of_bf16_is_rounded(tp: int) -> None:
    config = AutoConfig.for_model(
        **{**preset("tiny-qwen3"), "attention_bias": True, "dtype": "bfloat16"}
    )
    gm, stages = run_passes(captured_once(config, dtype=torch.bfloat16).graph, decode_pipeline(tp))
    assert stages[-1].stats.matches == 4
    assert not calls(gm, aten.add.Tensor) and not calls(gm, aten.to.dtype)
    biased = [node for node in calls(gm, ALL_REDUCE_RESIDUAL) if len(node.args) == 3]
    assert [value_type(operand(node, 2)).dtype for node in biased] == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_the_bits_are_those_of_the_steps(first: bool, dtype: torch.dtype) -> None:
    gm = numbered(biased_graph(dtype, first=first)).to(dtype)
    x, y = torch.randn(2, 3, WIDTH).to(dtype).unbind()
    before = gm(x, y)
    assert FuseResidual().apply(gm).matches == 1
    gm.recompile()
    assert torch.equal(gm(x, y), before)


def test_a_bias_that_no_residual_meets_is_left() -> None:
    gm = biased_graph(torch.float32, alone=True)
    assert "its terms must have the same shape and dtype" in nearest(FuseResidual().apply(gm))


def test_a_biased_sum_that_others_read_is_left() -> None:
    gm = biased_graph(torch.float32, read=True)
    assert "%add_2 also reads it" in nearest(FuseResidual().apply(gm))


def test_a_residual_is_no_bias() -> None:
    """A sum that is left is the residual of the next one, in either order of the terms."""
    builder = GraphBuilder()
    x, y = (builder.input(name, "T", WIDTH) for name in ("x", "y"))
    sums = []
    for name in ("o", "down"):
        projected = builder.call(LINEAR, y, builder.parameter(f"{name}.weight", WIDTH, WIDTH))
        projected.meta["type"] = value_type(projected).placed(PARTIAL)
        sums.append(builder.call(ALL_REDUCE, projected))
    left = builder.call(aten.add.Tensor, x, sums[0])
    added = builder.call(aten.add.Tensor, sums[1], left)
    gm = builder.done(builder.call(aten.add.Tensor, added, builder.call(aten.neg.default, sums[0])))
    terms = operand(sums[1])
    assert FuseResidual().apply(gm).matches == 1
    (fused,) = calls(gm, ALL_REDUCE_RESIDUAL)
    assert fused.args == (terms, left)


def biased_graph(
    dtype: torch.dtype, *, first: bool = False, alone: bool = False, read: bool = False
) -> fx.GraphModule:
    """Return `x + (all_reduce(linear(y)) + bias)`, rounded where the dtype requires it."""
    builder = GraphBuilder()
    x, y = (builder.input(name, "T", WIDTH, dtype=dtype) for name in ("x", "y"))
    projected = builder.call(LINEAR, y, builder.parameter("o.weight", WIDTH, WIDTH, dtype=dtype))
    projected.meta["type"] = value_type(projected).placed(PARTIAL)
    wide = [] if dtype == torch.float32 else [torch.float32]
    terms = (
        builder.call(ALL_REDUCE, projected, *wide),
        builder.parameter("o.bias", WIDTH, dtype=dtype),
    )
    biased = builder.call(aten.add.Tensor, *terms[:: -1 if first else 1])
    if alone:
        return builder.done(biased)
    result = builder.call(aten.add.Tensor, *(x, biased)[:: -1 if first else 1])
    if wide:
        result = builder.call(aten.to.dtype, result, dtype)
    return builder.done(builder.call(aten.add.Tensor, result, biased) if read else result)
