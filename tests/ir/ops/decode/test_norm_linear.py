"""A norm fused with a linear gives the bits of separate ops, for any split of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ir.ranks import Operand, operand, random, refused, run
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.ops import LINEAR, NORM_GATE_UP_SWIGLU, NORM_LINEAR, RMS_NORM, SWIGLU
from tpcompile.ir.plan import plan_axis
from tpcompile.ir.types import REPLICATE, Shard, ValueType

HIDDEN, EPS = 10, 1e-5
X, NORM = random(3, HIDDEN), random(HIDDEN, seed=1)


@pytest.mark.parametrize("bias", [None, random(7, seed=3)], ids=["plain", "bias"])
def test_the_same_bits_as_norm_and_linear(bias: Operand | None) -> None:
    weight = random(7, HIDDEN, seed=2)
    added = None if bias is None else bias.whole
    normed = RMS_NORM(X.whole, NORM.whole, EPS)
    output = NORM_LINEAR(X.whole, NORM.whole, EPS, weight.whole, added)
    assert torch.equal(output, LINEAR(normed, weight.whole, added))
    outcome = run(NORM_LINEAR, X, NORM, EPS, weight, bias, ranks=2)
    assert isinstance(outcome.kind, ValueType) and outcome.kind.placement == REPLICATE
    outcome.assert_sound(exact=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ffn", [6, 11])
def test_the_same_bits_as_gate_and_up(ffn: int, bias: bool) -> None:
    """Trap 21: no column is lost, whatever the width."""
    weight, added = random(2 * ffn, HIDDEN, seed=2).whole, random(2 * ffn, seed=3).whole
    rows = LINEAR(RMS_NORM(X.whole, NORM.whole, EPS), weight, added if bias else None)
    output = NORM_GATE_UP_SWIGLU(X.whole, NORM.whole, EPS, weight, added if bias else None)
    assert torch.equal(output, SWIGLU(rows[:, :ffn], rows[:, ffn:]))
    assert output.shape == (3, ffn)


@pytest.mark.parametrize("tp", [2, 3, 4, 7])
def test_vocabularies_of_any_split_are_sound(tp: int) -> None:
    vocabulary = plan_axis("vocab", 13, tp)
    weight = random(13, HIDDEN, seed=2).sharded(0, vocabulary)
    outcome = run(NORM_LINEAR, X, NORM, EPS, weight, ranks=tp)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == Shard(1, vocabulary)
    outcome.assert_sound()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("ffn", "grain", "tp"), [(12, 1, 2), (11, 1, 3), (20, 4, 3), (8, 2, 4)])
def test_uneven_gates_are_sound(ffn: int, grain: int, tp: int, bias: bool) -> None:
    layout = plan_axis("ffn", ffn, tp, grain)
    fused = FusedLayout((layout, layout))
    weight = random(2 * ffn, HIDDEN, seed=2).sharded(0, fused)
    added = [random(2 * ffn, seed=3).sharded(0, fused)] if bias else []
    outcome = run(NORM_GATE_UP_SWIGLU, X, NORM, EPS, weight, *added, ranks=tp)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == Shard(1, layout)
    outcome.assert_sound()


GATE = Layout("ffn", 6, 1, even_runs(6, 2))
UP = Layout("ffn", 6, 1, (((0, 2),), ((2, 6),)))
WEIGHT = random(12, HIDDEN, seed=2)
REFUSALS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "terms": ("partial-nonlinear", (X.partial(), NORM, EPS, WEIGHT)),
    "a norm of one rank's part": (
        "norm-axis",
        (X.sharded(1, Layout("hidden", 10, 1, even_runs(10, 2))), NORM, EPS, WEIGHT),
    ),
    "a scale of another width": ("norm-weight", (X, random(4), EPS, WEIGHT)),
    "split columns": (
        "contraction-layout",
        (X, NORM, EPS, WEIGHT.sharded(1, Layout("hidden", 10, 1, even_runs(10, 2)))),
    ),
    "a replicated bias": (
        "bias-layout",
        (X, NORM, EPS, WEIGHT.sharded(0, FusedLayout((GATE, GATE))), random(12)),
    ),
    "another dtype": ("linear-shape", (X, NORM, EPS, operand(WEIGHT.whole.bfloat16()))),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("target", [NORM_LINEAR, NORM_GATE_UP_SWIGLU], ids=str)
def test_refuses(target: Any, name: str) -> None:
    rule, operands = REFUSALS[name]
    refused(rule, target, *operands)


@pytest.mark.parametrize(
    ("rule", "weight"),
    [
        ("gate-up", random(7, HIDDEN)),
        ("same-layout", WEIGHT.sharded(0, FusedLayout((GATE, UP)))),
        ("split-segments", WEIGHT.sharded(0, Layout("ffn", 12, 1, even_runs(12, 2)))),
    ],
    ids=["odd", "gate and up apart", "split as one"],
)
def test_refuses_gates_that_have_no_up(rule: str, weight: Operand) -> None:
    refused(rule, NORM_GATE_UP_SWIGLU, X, NORM, EPS, weight)
