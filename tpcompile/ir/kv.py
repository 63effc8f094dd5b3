"""Rows of the KV cache: the keys, or the values, of one token and one KV head.

Without a format a row is its values in the model's dtype. In the format int8:row:f32 it is the
values rounded to int8, followed by the bytes of their scale in fp32. Both are in one row of one
tensor, so that code that copies, shares or frees rows handles the scales too, and attention reads
one stream of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from tpcompile.ir.format import SCALE, Format
from tpcompile.ir.quantize import integers_of

ROUNDED = Format.int8(torch.float32)
"""Integers with an fp32 scale per row. A scale in bf16 would save 1.5 % of a row of 128 values, but
add up to 0.2 % to the error of each value; one in float16 would overflow where bf16 does not."""
KV_FORMATS: Mapping[str, Format] = MappingProxyType({"int8": ROUNDED})
"""The formats of rows by their names in options."""


def row_in_memory(width: int, dtype: torch.dtype, stored: Format | None) -> tuple[int, torch.dtype]:
    """Return the number and the dtype of the elements of a row of `width` values."""
    if stored is None:
        return width, dtype
    return stored.row_bytes(0, width), stored.values.dtype.torch


def is_rounded(rows: torch.Tensor) -> bool:
    """Return whether rows in memory are integers with their scale."""
    return rows.dtype == ROUNDED.values.dtype.torch


def stored_rows(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return keys or values `[…, width]` as rows of a cache.

    Each row is rounded as `rounded` in `quantize.py` rounds a block. The scale of a row with a
    value that is not finite is NaN.
    """
    if not is_rounded(cache):
        return x
    integers, scales = integers_of(x.float())
    finite = scales.isfinite()
    scales = scales.where(finite, torch.nan)
    values = integers.where(finite, 0).to(cache.dtype)
    return torch.cat([values, scales.contiguous().view(cache.dtype)], -1)


def loaded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the values of rows: as they are, or in fp32 the products of integers and scale."""
    if not is_rounded(rows):
        return rows
    parts = {component.suffix: component.dtype for component in ROUNDED.components}
    width = rows.shape[-1] - parts[SCALE].itemsize
    scales = rows[..., width:].contiguous().view(parts[SCALE].torch)
    return rows[..., :width] * scales


def rounded_values(x: torch.Tensor, stored: Format) -> torch.Tensor:
    """Return keys or values `[…, width]` after a round trip through a format, in their dtype."""
    row = x.new_empty(0, dtype=stored.values.dtype.torch)
    return loaded_rows(stored_rows(x, row)).to(x.dtype)


def nan_element(rows: torch.Tensor) -> float:
    """Return the element of rows that are NaN: a scale is NaN if all its bits are set."""
    return -1 if is_rounded(rows) else torch.nan
