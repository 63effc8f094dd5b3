"""The conversions of llama.cpp, undone."""

from __future__ import annotations

import math

import pytest
import torch

from tpcompile.gguf.conversions import CENTRED, LOGARITHM, Order


@pytest.mark.parametrize(
    ("order", "extent", "places"),
    [
        (Order(0, 2, 3, 2), 12, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]),
        (Order(0, 1, 2, 3), 6, [0, 3, 1, 4, 2, 5]),
        (Order(0, 1, 2, 3), 12, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]),
        (Order(-1, 1, 3, 2, first=3), 9, [0, 1, 2, 3, 5, 7, 4, 6, 8]),
    ],
)
def test_places(order: Order, extent: int, places: list[int]) -> None:
    assert order.places(extent).tolist() == places


def test_values() -> None:
    """Logarithms are rounded once, from fp64."""
    stored = -torch.logspace(-30, 4, 1000)
    logarithms = LOGARITHM.function(stored)
    wanted = torch.tensor([math.log(-value) for value in stored.tolist()])
    assert logarithms.dtype == torch.float32 and torch.equal(logarithms, wanted)
    weights = torch.tensor([-1.0, 0.0, 0.25, 2.0**-20])
    assert torch.equal(CENTRED.function(1 + weights), weights)
