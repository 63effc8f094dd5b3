"""A weight laid out for this machine gives what torch gives, and can be had back."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tpcompile.backends.torch_tp.matrix import as_matrix, linear, plain

SHAPES = [(1013, 64), (507, 896), (13, 24), (1, 8), (48, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_the_sums_are_in_fp32_and_rounded_once(
    dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(tokens, shape[1]).to(dtype)
    matrix = as_matrix(weight)
    assert matrix.shape == weight.shape
    assert torch.equal(plain(matrix), weight)
    for added in (None, bias):
        with torch.inference_mode():
            found, torchs = linear(x, matrix, added), functional.linear(x, weight, added)
        if matrix is weight:
            assert torch.equal(found, torchs), "it is the same call"
        assert found.dtype == dtype
        assert bool((_error(found, x, weight, added) <= _allowed(x, weight, added)).all())


def _error(
    found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return (found.double() - exact).abs()


def _allowed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The bound for any order of an fp32 sum, and one rounding of the dtype at the end."""
    added = torch.zeros(len(weight)) if bias is None else bias
    magnitudes = functional.linear(x.double().abs(), weight.double().abs(), added.double().abs())
    terms = x.shape[1] + 1
    summing = terms * torch.finfo(torch.float32).eps / 2 * magnitudes
    exact = functional.linear(x.double(), weight.double(), added.double()).abs()
    return summing + torch.finfo(x.dtype).eps / 2 * (exact + summing)


def test_sums_in_bf16_would_be_found() -> None:
    """The bound is tight enough to tell a sum that is rounded on its way."""
    torch.manual_seed(0)
    weight, x = torch.randn(507, 896).bfloat16(), torch.randn(33, 896).bfloat16()
    halves = [
        functional.linear(x[:, part], weight[:, part]) for part in (slice(448), slice(448, 896))
    ]
    assert bool((_error(halves[0] + halves[1], x, weight, None) > _allowed(x, weight, None)).any())


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
