"""The residual is fused into a projection, or into the sum of its terms across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.passes.decoding import decode_step, filled, run_step
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import SEQUENCE_PARALLEL
from tests.passes.test_fuse_norm_linear import numbered
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_REDUCE, ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL, SPECS
from tpcompile.ir.types import PARTIAL
from tpcompile.passes import for_ranks, parse_pipeline, run_passes
from tpcompile.passes.fuse_residual import FuseResidual
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.presets import preset
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
WIDTH = 6


@pytest.mark.parametrize("tp", [1, 4])
def test_golden(tp: int, golden: Callable[[str, str], None]) -> None:
    golden(f"passes/fuse_residual_tp{tp}.txt", decode_step("fuse-residual", tp=tp).plain.diff())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_two_a_layer(model: str, tp: int) -> None:
    """On several ranks the embedding's sum remains, since it is not added to a residual."""
    current = decode_step("fuse-residual", model, tp).plain
    gm = current.after.graph
    assert current.matches == 4
    assert not calls(gm, aten.add.Tensor)
    assert len(calls(gm, LINEAR_RESIDUAL)) == (4 if tp == 1 else 0)
    assert len(calls(gm, ALL_REDUCE_RESIDUAL)) == (0 if tp == 1 else 4)
    assert len(calls(gm, ALL_REDUCE)) == (0 if tp == 1 else 1)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    step = decode_step("fuse-residual", model, tp)
    step.assert_same_bits()
    step.assert_near()


def test_again() -> None:
    assert decode_step("fuse-residual").plain.again().matches == 0
    assert decode_step("fuse-residual", tp=1).plain.again().matches == 0


@pytest.mark.parametrize("tp", [1, 3])
def test_bf16_sums_stay_in_fp32_until_they_are_rounded(tp: int) -> None:
    config = AutoConfig.for_model(**{**preset("tiny-qwen2"), "dtype": "bfloat16"})
    captured = captured_once(config, dtype=torch.bfloat16)
    gm, stages = run_passes(captured.graph, decode_pipeline(tp))
    assert stages[-1].stats.matches == 4
    assert not calls(gm, aten.add.Tensor) and not calls(gm, aten.to.dtype)
    for node in calls(gm, ALL_REDUCE_RESIDUAL):
        assert value_type(node).dtype == value_type(operand(node)).dtype == torch.bfloat16


def test_a_residual_that_counts_on_every_rank_is_wrong() -> None:
    """Trap 6 put back: adding the residual on each rank counts it more than once."""
    step = decode_step("fuse-residual", tp=2)
    gm = step.after.graph
    prefill = filled("tiny-qwen3", 2, (9,))
    spec = SPECS[ALL_REDUCE_RESIDUAL]
    right = run_step(gm, step.plain.pair, prefill.inputs, prefill.kept)
    node = calls(gm, ALL_REDUCE_RESIDUAL)[0]
    assert spec.across is not None
    nodes = {other.name: values for other, values in right.values.items()}
    terms, residual = (nodes[operand(node, place).name] for place in (0, 1))
    twice = [term + residual[0] for term in terms]
    kind = value_type(node)
    sums = spec.across(twice, kind.placed(PARTIAL), kind, residual)
    assert not torch.allclose(sums[0], nodes[node.name][0])


def test_ranks_that_hold_tokens_have_no_sum_to_add_to() -> None:
    captured = decode_step("fuse-residual").plain.pair.captured.graph
    text = SEQUENCE_PARALLEL.replace("fuse-add-norm,", "")
    gm, _ = run_passes(captured, for_ranks(parse_pipeline(text), 2))
    assert "neither term is a projection" in nearest(FuseResidual().apply(gm))


def residual_graph(
    *,
    dtype: torch.dtype = torch.float32,
    first: bool = False,
    number: bool = False,
    narrow: bool = False,
    itself: bool = False,
    read: bool = False,
    term: bool = False,
    summed: torch.dtype | None = None,
    rounded: int = 0,
    early: bool = False,
    terms_read: bool = False,
) -> fx.GraphModule:
    """Return `x + linear(y)` with deviations; `summed` is the dtype of an all-reduce."""
    builder = GraphBuilder()
    x = builder.input("x", WIDTH if narrow else "T", *([] if narrow else [WIDTH]), dtype=dtype)
    y = builder.input("y", "T", WIDTH, dtype=dtype)
    weight = builder.parameter("o.weight", WIDTH, WIDTH, dtype=dtype)
    projected = builder.call(LINEAR, y, weight)
    addends = []
    if term or summed:
        projected.meta["type"] = value_type(projected).placed(PARTIAL)
    if summed:
        addends += [builder.call(ALL_REDUCE, projected)] if terms_read else []
        wide = [] if summed == dtype else [summed]
        projected = builder.call(ALL_REDUCE, projected, *wide)
    residual: Any = 1.0 if number else projected if itself else x
    terms = (projected, residual) if first else (residual, projected)
    kind = value_type(projected) if term else None
    result = builder.call(aten.add.Tensor, *terms, kind=kind)
    addends += [projected] if read else []
    casts = [builder.call(aten.to.dtype, result, dtype) for _ in range(rounded)]
    addends += [builder.call(aten.neg.default, result)] if early else []
    for addend in (*casts[1:], *addends):
        casts = [builder.call(aten.add.Tensor, (casts or [result])[0], addend), *casts]
    return builder.done(casts[0] if casts else result)


@pytest.mark.parametrize("first", [False, True])
def test_either_order_is_added(first: bool) -> None:
    gm = numbered(residual_graph(first=first))
    x, y = torch.randn(2, 3, WIDTH).unbind()
    before = gm(x, y)
    assert FuseResidual().apply(gm).matches == 1
    assert check_graph(gm) == []
    gm.recompile()
    assert torch.equal(gm(x, y), before)


BF16, FP32 = torch.bfloat16, torch.float32
NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"number": True, "first": True}, "it is not a plain sum of two values"),
    "a residual that broadcasts": (
        {"narrow": True},
        "its terms must have the same shape and dtype, got f32[6]",
    ),
    "a projection twice": ({"itself": True}, "it adds a projection to itself"),
    "a projection read elsewhere": ({"read": True}, "%add_1 also reads it"),
    "terms": ({"term": True}, "its result is partial and must be reduced first"),
    "a sum read elsewhere": ({"summed": FP32, "read": True}, "%add_1 also reads it"),
    "terms read elsewhere": (
        {"summed": FP32, "terms_read": True},
        "%all_reduce also reads it",
    ),
    "a sum in fp64": ({"summed": torch.float64}, "its terms must be summed in"),
    "a sum that is not rounded": ({"dtype": BF16, "summed": FP32}, "before it is rounded"),
    "a sum read before it is rounded": (
        {"dtype": BF16, "summed": FP32, "rounded": 1, "early": True},
        "%neg reads the sum before it is rounded",
    ),
    "a sum rounded twice": (
        {"dtype": BF16, "summed": FP32, "rounded": 2},
        "exactly one cast must round it",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = residual_graph(**changes)
    before = [node.name for node in gm.graph.nodes]
    report = FuseResidual().apply(gm)
    assert report.matches == 0 and reason in str(report.nearest)
    assert [node.name for node in gm.graph.nodes] == before
