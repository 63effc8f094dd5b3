"""Experts of many tokens: near the dialect's reference, and each token as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backends.native.many_tokens import NEEDS, near, random, random_weight
from tpcompile.backends.native import functions, mixtures
from tpcompile.backends.torch_tp import matrix
from tpcompile.ir.format import Format
from tpcompile.ir.ops.experts import top_experts

pytestmark = NEEDS
EXPERTS, HIDDEN, FEATURES = 7, 96, 64
FORMATS = {
    "bf16": None,
    "int4": Format.int4(torch.float16, 32),
    "int4 with offsets": Format.int4(torch.bfloat16, 32, offsets=True),
    "int8": Format.int8(torch.float32, 0),
    "int8, rounded tokens": Format.int8(torch.float16, 32).rounding(True),
    "fp8": Format.parsed("fp8:32:f32"),
}


def drawn(stored: Format | None, rows: int, columns: int, count: int = EXPERTS) -> Any:
    """Return random weights of experts."""
    if stored is None:
        return 0.1 * random(count, rows, columns)
    weights = [random_weight(stored, 0, rows, columns) for _ in range(count)]
    parts = [
        torch.stack(parts) for parts in zip(*(weight.parts for weight in weights), strict=True)
    ]
    return functions.DecodedExperts(str(stored), parts, (0, columns), torch.bfloat16)


def reference(weights: Any) -> Any:
    """Return weights for torch's function."""
    if isinstance(weights, torch.Tensor):
        return weights
    return matrix.DecodedExperts(weights.word, weights.parts, weights.columns, weights.dtype)


def some(weights: Any, chosen: slice) -> Any:
    """Return some of the experts, as memory of their own."""
    if isinstance(weights, torch.Tensor):
        return weights[chosen].contiguous()
    return replace(weights, parts=[part[chosen].contiguous() for part in weights.parts])


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("chosen", [1, 3, EXPERTS])
def test_experts(stored: Format | None, tokens: int, chosen: int) -> None:
    gate_up, down = drawn(stored, 2 * FEATURES, HIDDEN), drawn(stored, HIDDEN, FEATURES)
    x = random(tokens, HIDDEN)
    scores, ids = top_experts(random(tokens, EXPERTS), chosen, True)
    assert mixtures.takes(x, gate_up, down)
    actual = functions.experts(x, scores, ids, gate_up, down)
    near(actual, matrix.experts(x, scores, ids, reference(gate_up), reference(down)), steps=4)
    for token in range(0, tokens, 23):
        row = slice(token, token + 1)
        alone = functions.experts(x[row], scores[row], ids[row], gate_up, down)
        assert torch.equal(alone, actual[row])


@pytest.mark.parametrize("stored", [None, FORMATS["int4"]], ids=["bf16", "int4"])
def test_experts_of_a_rank(stored: Format | None) -> None:
    gate_up, down = drawn(stored, 2 * FEATURES, HIDDEN), drawn(stored, HIDDEN, FEATURES)
    x = random(40, HIDDEN)
    scores, ids = top_experts(random(40, EXPERTS), 2, False)
    total = torch.zeros(40, HIDDEN)
    for first, last in ((0, 2), (2, 3), (3, EXPERTS)):
        shards = [some(weights, slice(first, last)) for weights in (gate_up, down)]
        actual = functions.experts(x, scores, ids, *shards, first)
        near(actual, matrix.experts(x, scores, ids, *map(reference, shards), first), steps=4)
        total += actual.float()
    near(total.bfloat16(), functions.experts(x, scores, ids, gate_up, down), steps=8)


def test_a_rank_without_chosen_experts_adds_zeros() -> None:
    gate_up, down = drawn(None, 2 * FEATURES, HIDDEN, 2), drawn(None, HIDDEN, FEATURES, 2)
    x, ids = random(5, HIDDEN), torch.full((5, 1), 3)
    actual = functions.experts(x, random(5, 1), ids, gate_up, down)
    assert torch.equal(actual, torch.zeros(5, HIDDEN, dtype=x.dtype))


def test_others_are_torchs() -> None:
    """In fp32, and if no kernel takes the width."""
    for x, features in ((torch.randn(3, HIDDEN), FEATURES), (random(3, HIDDEN), 24)):
        gate_up = torch.randn(2, 2 * features, HIDDEN, dtype=x.dtype)
        down = torch.randn(2, HIDDEN, features, dtype=x.dtype)
        assert not mixtures.takes(x, gate_up, down)
        scores, ids = top_experts(torch.randn(3, 2, dtype=x.dtype), 1, True)
        actual = functions.experts(x, scores, ids, gate_up, down)
        near(actual.bfloat16(), matrix.experts(x, scores, ids, gate_up, down).bfloat16())
