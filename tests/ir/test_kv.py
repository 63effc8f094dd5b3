"""Rows of the KV cache in int8: the formula in numpy, and zero, tiny and infinite rows."""

from __future__ import annotations

import numpy
import pytest
import torch

from tpcompile.dtypes import KV
from tpcompile.ir.kv import (
    KV_FORMATS,
    ROUNDED,
    is_rounded,
    loaded_rows,
    nan_element,
    row_in_memory,
    stored_rows,
)
from tpcompile.ir.quantize import rounded

EIGHT = torch.empty(0, dtype=torch.int8)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [1, 6, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_integers_and_then_their_scale(width: int, dtype: torch.dtype) -> None:
    x = (3 * random(5, 2, width)).to(dtype)
    rows = stored_rows(x, EIGHT)
    assert (rows.shape[-1], rows.dtype) == row_in_memory(width, dtype, ROUNDED)
    held = rows.numpy()
    scales = numpy.ascontiguousarray(held[..., width:]).view("<f4")
    exact = x.float().numpy()
    most = numpy.abs(exact).max(-1, keepdims=True)
    assert numpy.array_equal(scales, most / numpy.float32(127))
    assert numpy.array_equal(held[..., :width], numpy.rint(exact * (numpy.float32(127) / most)))
    assert numpy.array_equal(loaded_rows(rows).numpy(), held[..., :width] * scales)


def test_each_row_has_a_scale_of_its_own() -> None:
    x = random(4, 3, 16)
    whole = stored_rows(x, EIGHT)
    for token in range(4):
        for head in range(3):
            assert torch.equal(whole[token, head], stored_rows(x[token, head], EIGHT))


def test_the_rounding_is_that_of_the_inputs_of_linears() -> None:
    x = random(7, 128)
    expected = rounded(x, ROUNDED.rounding())
    assert torch.equal(loaded_rows(stored_rows(x, EIGHT)), expected)


def test_zero_tiny_and_infinite_rows() -> None:
    x = random(5, 8)
    x[0], x[1], x[2, 3], x[3, 2] = 0, 1e-42, torch.inf, torch.nan
    rows = loaded_rows(stored_rows(x, EIGHT))
    assert rows[:2].eq(0).all() and rows[2:4].isnan().all() and rows[4].isfinite().all()


def test_rows_without_a_format_are_the_values() -> None:
    x = random(3, 8).bfloat16()
    assert stored_rows(x, x) is x and loaded_rows(x) is x and not is_rounded(x)
    assert row_in_memory(8, torch.bfloat16, None) == (8, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_unused_rows_are_nan(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 12, dtype=dtype)
    assert loaded_rows(rows.fill_(nan_element(rows))).isnan().all()


def test_the_names_of_options_are_those_of_formats() -> None:
    assert tuple(KV_FORMATS) == KV
    assert str(KV_FORMATS["int8"]) == "int8:row:f32"
