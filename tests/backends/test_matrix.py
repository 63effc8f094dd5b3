"""Linears equal torch's for each weight layout and kernel; weights can be restored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tpcompile.backends.torch_tp import matrix as matrices
from tpcompile.backends.torch_tp.matrix import as_matrix, linear, plain

SHAPES = [(1013, 64), (507, 896), (13, 24), (1, 8), (48, 64)]
WAYS = {"reordered": (True, False), "weight first": (False, True), "as torch does": (False, False)}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force a layout that other CPUs prefer; skip it if this CPU lacks the kernels."""
    name: str = request.param
    reorders, first = WAYS[name]
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if reorders and not bf16:
        pytest.skip("this CPU has no kernels for reordered weights")
    narrow = torch.bfloat16
    monkeypatch.setattr(matrices, "_reorders", lambda dtype: reorders and dtype == narrow)
    monkeypatch.setattr(matrices, "_puts_weight_first", lambda dtype: first and dtype == narrow)
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 33, 65])
def test_the_sums_are_in_fp32_and_rounded_once(
    dtype: torch.dtype, shape: tuple[int, int], tokens: int, way: str
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(tokens, shape[1]).to(dtype)
    matrix = as_matrix(weight)
    assert matrix.is_mkldnn == (way == "reordered" and dtype == torch.bfloat16)
    assert matrix.shape == weight.shape
    assert torch.equal(plain(matrix), weight)
    for added in (None, bias):
        with torch.inference_mode():
            actual, torchs = linear(x, matrix, added), functional.linear(x, weight, added)
        if dtype != torch.bfloat16 or way == "as torch does":
            assert torch.equal(actual, torchs), "the calls are identical"
        assert actual.dtype == dtype and actual.shape == torchs.shape
        assert actual.is_contiguous()
        assert bool((_error(actual, x, weight, added) <= _allowed(x, weight, added)).all())


def _error(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return (actual.double() - exact).abs()


def _allowed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the error bound for an fp32 sum in any order, rounded once to the dtype."""
    added = torch.zeros(len(weight)) if bias is None else bias
    magnitudes = functional.linear(x.double().abs(), weight.double().abs(), added.double().abs())
    terms = x.shape[1] + 1
    summing = terms * torch.finfo(torch.float32).eps / 2 * magnitudes
    exact = functional.linear(x.double(), weight.double(), added.double()).abs()
    return summing + torch.finfo(x.dtype).eps / 2 * (exact + summing)


def test_sums_in_bf16_would_be_found() -> None:
    """The bound is tight enough to detect a sum with an intermediate rounding to bf16."""
    torch.manual_seed(0)
    weight, x = torch.randn(507, 896).bfloat16(), torch.randn(33, 896).bfloat16()
    halves = [
        functional.linear(x[:, part], weight[:, part]) for part in (slice(448), slice(448, 896))
    ]
    assert bool((_error(halves[0] + halves[1], x, weight, None) > _allowed(x, weight, None)).any())


def test_only_bf16_is_treated_in_another_way() -> None:
    """Only bf16 weights are stored in another layout: other dtypes lack kernels, or change bits."""
    for dtype in (torch.float32, torch.float16, torch.float64):
        assert not matrices._reorders(dtype) and not matrices._puts_weight_first(dtype)
        weight = torch.ones(4, 4, dtype=dtype)
        assert as_matrix(weight) is weight
    assert not (matrices._reorders(torch.bfloat16) and matrices._puts_weight_first(torch.bfloat16))


def test_a_rank_without_rows_keeps_an_empty_weight(way: str) -> None:
    empty = torch.ones(0, 8, dtype=torch.bfloat16)
    assert as_matrix(empty) is empty
    for tokens in (1, 2):
        x = torch.ones(tokens, 8, dtype=torch.bfloat16)
        assert linear(x, empty).shape == (tokens, 0)
    assert linear(torch.ones(0, 8).bfloat16(), torch.ones(4, 8).bfloat16()).shape == (0, 4)
