"""What tests of kernels for many tokens share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpcompile.backends.native import functions, many
from tpcompile.ir.format import Format

NEEDS = [
    pytest.mark.skipif(not many.available(), reason="needs AVX2"),
    pytest.mark.usefixtures("every_path"),
]
TOKENS = [1, 3, 16, 65, 200]


def near(actual: torch.Tensor, expected: torch.Tensor, steps: int = 2) -> None:
    """Assert that results differ by a few units of bf16, of the largest value of the row."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    largest = expected.float().abs().amax(-1, keepdim=True)
    assert bool(((actual.float() - expected.float()).abs() <= steps * 2**-8 * largest).all())


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def drawn(rows: int, columns: int, signed: bool) -> torch.Tensor:
    """Return random numbers, of many magnitudes if they have signs."""
    if not signed:
        return torch.rand(rows, columns)
    return torch.randn(rows, columns) * torch.randint(-9, 7, (rows, columns)).exp2()


def random_weight(stored: Format, first: int, rows: int, width: int) -> Any:
    """Return a random weight of these columns."""
    parts = [
        drawn(rows, part.width(first, first + width), part == stored.values).to(part.dtype.torch)
        if part.dtype.torch.is_floating_point
        else torch.randint(
            *((-(2**31), 2**31) if part.dtype.torch == torch.int32 else (-100, 100)),
            (rows, part.width(first, first + width)),
            dtype=part.dtype.torch,
        )
        for part in stored.components
    ]
    return functions.decoded(str(stored), parts, (first, first + width), torch.bfloat16)
