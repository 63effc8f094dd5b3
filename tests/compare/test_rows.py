"""Comparing two values separates mistakes from rounding."""

from __future__ import annotations

import pytest
import torch

from tpcompile.compare.rows import rounding_limit, row_of, token_margin

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("actual", "ranks", "message"),
    [
        (torch.tensor([1.0, float("nan"), 1.0]), [], "NaN"),
        (torch.tensor([1.0, float("inf"), 1.0]), [], "infinity"),
        (torch.ones(4), [], "shape (4,), expected (3,)"),
        (ONES, [ONES, ONES + 1e-7], "ranks differ"),
    ],
)
def test_what_is_wrong_beside_the_error(
    actual: torch.Tensor, ranks: list[torch.Tensor], message: str
) -> None:
    row = row_of("x", "", actual, ONES, ranks=ranks)
    assert (row.ok, row.problem) == (False, message)


def test_the_limit_is_that_of_the_dtype_or_the_one_given() -> None:
    off = ONES + 1e-3
    assert not row_of("x", "", off, ONES).ok
    assert row_of("x", "", off, ONES, tolerance=1e-2).ok
    assert row_of("x", "", off.bfloat16(), ONES.bfloat16()).ok
    assert not row_of("x", "", off, ONES, tolerance=0.0).ok


NARROW = (torch.bfloat16, torch.float16)


def _rounded(dtype: torch.dtype, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a value in fp32 and with the rounding errors of a long computation in `dtype`."""
    exact = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))
    return exact, (exact + 4 * torch.finfo(dtype).eps * noise).to(dtype)


@pytest.mark.parametrize("tokens", [1, 27])
@pytest.mark.parametrize("dtype", NARROW)
def test_other_roundings_are_no_mistake(dtype: torch.dtype, tokens: int) -> None:
    """Values that are equally far from fp32 pass, however far they are from each other."""
    exact, expected = _rounded(dtype, tokens, 0)
    for seed in range(1, 50):
        row = row_of("x", "", _rounded(dtype, tokens, seed)[1], expected, exact=exact)
        assert row.ok and row.beside_fp32
        assert row.error <= row.limit < row.rel * 9


@pytest.mark.parametrize("dtype", NARROW)
def test_twice_the_roundings_are_one(dtype: torch.dtype) -> None:
    """Twice the rounding error fails, as does 1 wrong token of 27; a single token may do so."""
    exact, expected = _rounded(dtype, 27, 0)
    worse = (exact + 2 * (expected.float() - exact)).to(dtype)
    assert not row_of("x", "", worse, expected, exact=exact).ok
    one_token = expected.clone()
    one_token[3] = expected[4]
    assert not row_of("x", "", one_token, expected, exact=exact).ok
    alone = (worse[:1], expected[:1])
    assert row_of("x", "", *alone, exact=exact[:1]).ok


def test_a_value_that_is_exact_may_be_rounded_once() -> None:
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    expected = exact.bfloat16()
    once = (exact * (1 + 2**-10)).bfloat16()
    assert row_of("x", "", once, expected, exact=exact).ok
    twice = (exact * (1 + 2**-7)).bfloat16()
    assert not row_of("x", "", twice, expected, exact=exact).ok
    assert rounding_limit(expected, exact) == (1 + 3 / 8) * 2**-9


def test_a_tolerance_that_is_given_rules() -> None:
    exact, expected = _rounded(torch.bfloat16, 27, 0)
    row = row_of("x", "", expected, expected, 0.0, exact=exact)
    assert (row.ok, row.beside_fp32, row.error, row.limit) == (True, False, 0.0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_is_a_mistake_beside_fp32_too(value: float) -> None:
    exact, expected = _rounded(torch.bfloat16, 4, 0)
    actual = expected.clone()
    actual[0, 0] = value
    assert not row_of("x", "", actual, expected, exact=exact).ok


def test_tokens_may_change_places_within_the_error_of_four_logits() -> None:
    exact = torch.tensor([[1.0, 8.0]])
    eager = torch.tensor([[1.25, 8.0]])
    assert token_margin(eager, exact) == 4 * 0.25 / 8
    assert token_margin(eager, exact, 0.5) == 0.5
    assert token_margin(eager, None) == 1e-5
