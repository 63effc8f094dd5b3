"""Rows of a linear of the normed residual, as they are or for the heads and logits of others."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, inverse_rms, no_sums, plus_products, total, with_bias
from .numbers import rounded
from .weights import place_of, rows_of, tiles_of


@triton.jit
def norm_rows(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute some rows of a linear, for linear attention or for gates of attention."""
    x = start_of(buffers, tl.load(words + abi.NORM_ROWS_NORMED_X), DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_ROWS_NORMED_WEIGHT), DTYPE)
    first = tl.load(words + abi.NORM_ROWS_ROWS)
    rows = tl.load(words + abi.NORM_ROWS_ROWS + 1) - first
    bias = norm
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_ROWS_BIAS), DTYPE) + first
    number = tl.load(words + abi.NORM_ROWS_OUT)
    out = start_of(buffers, number, DTYPE) + first
    stride = stride_of(buffers, number, 0)
    number = tl.load(words + abi.NORM_ROWS_WEIGHT)
    weight = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    for begin in range(0, BATCH, SEQUENCES):
        store_rows(
            x, norm, weight, bias, out, stride, rows, begin, BATCH, SEQUENCES, TILES,
            ROWS, COLUMNS, STAGES, WIDTH, EPS, ZERO_CENTERED, BIAS, DTYPE, FORMAT,
        )  # fmt: skip


@triton.jit
def store_rows(
    x,
    norm,
    weight,
    bias,
    out,
    stride,
    rows,
    begin,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store rows of a linear at `out[BATCH, stride]`, for the SEQUENCES from `begin` on.

    `weight`, `bias` and `out` begin with the first of the rows.
    """
    inverse = inverse_rms(x, begin, BATCH, SEQUENCES, WIDTH, EPS)
    sums = no_sums(ROWS, SEQUENCES, TILES)
    count = count_of(rows, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
    for tile in tl.range(0, count, num_stages=STAGES):
        row, place, is_last = place_of(tile, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
        tiles = tiles_of(
            weight, row, rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
        )
        sums = plus_products(
            sums, tiles, x, begin, norm, inverse, place, WIDTH,
            WIDTH, True, ZERO_CENTERED, BATCH, SEQUENCES, DTYPE, COLUMNS,
        )  # fmt: skip
        if is_last:
            for part in tl.static_range(TILES):
                sequences = begin + tl.arange(0, SEQUENCES)[None, :]
                places = row + part * ROWS + tl.arange(0, ROWS)[:, None]
                found = with_bias(total(sums, part, TILES), bias + places, places < rows, BIAS)
                inside = (places < rows) & (sequences < BATCH)
                tl.store(out + sequences * stride + places, rounded(found, DTYPE), mask=inside)
            sums = no_sums(ROWS, SEQUENCES, TILES)
