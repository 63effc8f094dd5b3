"""A weight laid out for this machine gives the bits that torch gives, and can be had back."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tpcompile.backends.torch_tp.matrix import as_matrix, linear, plain

SHAPES = [(1013, 64), (507, 896), (13, 24), (1, 8), (48, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_the_bits_are_those_of_torch(
    dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(tokens, shape[1]).to(dtype)
    matrix = as_matrix(weight)
    assert matrix.shape == weight.shape
    assert torch.equal(plain(matrix), weight)
    with torch.inference_mode():
        assert torch.equal(linear(x, matrix), functional.linear(x, weight))
        assert torch.equal(linear(x, matrix, bias), functional.linear(x, weight, bias))


def test_only_bf16_is_laid_out_anew() -> None:
    """Others would have other bits, or no kernel."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        weight = torch.ones(4, 4, dtype=dtype)
        assert as_matrix(weight) is weight
    helps = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert as_matrix(torch.ones(4, 4, dtype=torch.bfloat16)).is_mkldnn == helps


def test_a_rank_without_rows_keeps_an_empty_weight() -> None:
    empty = torch.ones(0, 8, dtype=torch.bfloat16)
    assert as_matrix(empty) is empty
    assert linear(torch.ones(2, 8, dtype=torch.bfloat16), empty).shape == (2, 0)
