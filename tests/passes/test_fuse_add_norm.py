"""A residual sum and the following norm are fused, unless another op reads the sum first."""

from __future__ import annotations

import pytest
import torch

from tests.passes.graphs import GraphBuilder
from tests.passes.texts import assert_left_alone, assert_rewritten, graph_text
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import ADD_RMS_NORM, RMS_NORM
from tpcompile.passes.fuse_add_norm import FuseAddNorm
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten


RESULT = "%out : f32[T, 8] Replicate"
BEFORE = graph_text(
    """
    %x = input : f32[T, 8] Replicate
    %y = input : f32[T, 8] Replicate
    %total = aten.add(%x, %y) : f32[T, 8] Replicate
    %scale = param(norm.weight) : f32[8] Replicate
    %normed = tpc.rms_norm(%total, %scale, eps=1e-06) : f32[T, 8] Replicate
    %out = aten.add(%normed, %total) : f32[T, 8] Replicate
    """,
    RESULT,
)
AFTER = graph_text(
    """
    %x = input : f32[T, 8] Replicate
    %y = input : f32[T, 8] Replicate
    %scale = param(norm.weight) : f32[8] Replicate
    %add_rms_norm = tpc.add_rms_norm(%x, %y, %scale, eps=1e-06) : (f32[T, 8] Replicate, f32[T, 8] Replicate)
    %normed_1 = %add_rms_norm[0] : f32[T, 8] Replicate
    %residual = %add_rms_norm[1] : f32[T, 8] Replicate
    %out = aten.add(%normed_1, %residual) : f32[T, 8] Replicate
    """,  # noqa: E501
    RESULT,
)
TOTAL = "%total = aten.add(%x, %y) : f32[T, 8] Replicate"
NEAR_MISSES = {
    "%read reads the sum before the norm": {
        TOTAL: f"{TOTAL}\n  %read = aten.neg(%total) : f32[T, 8] Replicate",
        "(%normed, %total)": "(%normed, %read)",
    },
    "it is not a plain sum of two values": {TOTAL: TOTAL.replace("%y)", "other=1.0)")},
    "its terms must have the same shape": {"%y = input : f32[T, 8]": "%y = input : f32[8]"},
    "its input is not a sum": {TOTAL: TOTAL.replace("aten.add", "aten.mul")},
}


def test_readers_after_the_norm_get_the_sum() -> None:
    assert_rewritten(FuseAddNorm(), BEFORE, AFTER)


def test_two_norms_of_one_sum_add_once() -> None:
    builder = GraphBuilder()
    total = builder.call(aten.add.Tensor, builder.input("x", "T", 8), builder.input("y", "T", 8))
    norms = [builder.call(RMS_NORM, total, builder.parameter(name, 8), 1e-6) for name in "ab"]
    gm = builder.done(builder.call(aten.add.Tensor, *norms))
    assert FuseAddNorm().apply(gm).matches == 1
    assert len(calls(gm, RMS_NORM)) == len(calls(gm, ADD_RMS_NORM)) == 1
    assert check_graph(gm) == []


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_near_miss_is_left_alone(reason: str) -> None:
    text = BEFORE
    for line, other in NEAR_MISSES[reason].items():
        assert text.count(line) == 1
        text = text.replace(line, other)
    assert_left_alone(FuseAddNorm(), text, reason)
