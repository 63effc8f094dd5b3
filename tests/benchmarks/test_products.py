"""The products of a decode step, repeated on weights in caches."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import CachedProducts


@pytest.mark.parametrize("weights", [None, "int4:32"])
def test_seconds(weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one product per second, the seconds are the number of products of a step."""
    with CachedProducts("tiny-qwen3", torch.bfloat16, 3, 2, weights) as products:
        assert 0 < products.seconds() < 60
        monkeypatch.setattr(products, "_rate", lambda work, numbers: 1.0)
        # two layers: q, k, v of (6 + 2 + 2) heads, o, gate, up, down; and the head
        layer = 64 * (10 * 16) + 64 * 96 + 3 * 64 * 176
        assert products.seconds() == pytest.approx(3 * (2 * layer + 1013 * 64))
