"""Projections that are added to the residual, or are terms of a sum."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, no_sums, plus_products, total, with_bias
from .numbers import as_rounded, rounded, sigmoid
from .weights import place_of, rows_of, tiles_of


@triton.jit
def linear_residual(
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
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Add some rows of a projection to the residual."""
    x = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_X), DTYPE)
    bias = x
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_BIAS), DTYPE)
    residual = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_RESIDUAL), DTYPE)
    number = tl.load(words + abi.LINEAR_RESIDUAL_OUT)
    out = start_of(buffers, number, DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + abi.LINEAR_RESIDUAL_ROWS)
    last = tl.load(words + abi.LINEAR_RESIDUAL_ROWS + 1)
    rows = last - first
    number = tl.load(words + abi.LINEAR_RESIDUAL_WEIGHT)
    weight = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    for begin in range(0, BATCH, SEQUENCES):
        sums = no_sums(ROWS, SEQUENCES, TILES)
        count = count_of(rows, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
        for tile in tl.range(0, count, num_stages=STAGES):
            row, place, is_last = place_of(tile, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
            tiles = tiles_of(
                weight, row, rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
            )
            sums = plus_products(
                sums, tiles, x, begin, x, 0.0, place, WIDTH,
                WIDTH, False, False, BATCH, SEQUENCES, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for part in tl.static_range(TILES):
                    sequences = begin + tl.arange(0, SEQUENCES)[None, :]
                    places = row + part * ROWS + tl.arange(0, ROWS)[:, None]
                    inside = (places < rows) & (sequences < BATCH)
                    found = total(sums, part, TILES)
                    found = with_bias(found, bias + first + places, places < rows, BIAS)
                    at = sequences * stride + first + places
                    found += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
                    tl.store(out + at, rounded(found, DTYPE), mask=inside)
                sums = no_sums(ROWS, SEQUENCES, TILES)


@triton.jit
def linear_terms(
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
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute a term of each sum: some rows and columns of a projection."""
    start = tl.load(words + abi.LINEAR_TERMS_COLUMNS)
    width = tl.load(words + abi.LINEAR_TERMS_COLUMNS + 1) - start
    x = start_of(buffers, tl.load(words + abi.LINEAR_TERMS_X), DTYPE) + start
    number = tl.load(words + abi.LINEAR_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32)
    out += tl.load(words + abi.LINEAR_TERMS_SLOT) * BATCH * stride
    first = tl.load(words + abi.LINEAR_TERMS_ROWS)
    last = tl.load(words + abi.LINEAR_TERMS_ROWS + 1)
    rows = last - first
    number = tl.load(words + abi.LINEAR_TERMS_WEIGHT)
    weight = rows_of(buffers, number, first, start, WIDTH, DTYPE, FORMAT)
    store_terms(
        x, weight, x, out + first, stride, rows, width, BATCH, SEQUENCES, TILES, ROWS,
        COLUMNS, STAGES, WIDTH, False, DTYPE, FORMAT,
    )  # fmt: skip


@triton.jit
def store_terms(
    x,
    weight,
    gates,
    out,
    stride,
    rows,
    width,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store terms at `out[BATCH, stride]`, multiplied by the sigmoid of a gate of each sequence.

    `weight` and `out` begin with the first of the rows, `weight` and `x` with that of the columns.
    """
    for begin in range(0, BATCH, SEQUENCES):
        sums = no_sums(ROWS, SEQUENCES, TILES)
        count = count_of(rows, width, TILES * ROWS, COLUMNS, SEQUENCES)
        for tile in tl.range(0, count, num_stages=STAGES):
            row, place, is_last = place_of(tile, width, TILES * ROWS, COLUMNS, SEQUENCES)
            tiles = tiles_of(
                weight, row, rows, place, width, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
            )
            sums = plus_products(
                sums, tiles, x, begin, x, 0.0, place, width,
                WIDTH, False, False, BATCH, SEQUENCES, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for part in tl.static_range(TILES):
                    sequences = begin + tl.arange(0, SEQUENCES)[None, :]
                    places = row + part * ROWS + tl.arange(0, ROWS)[:, None]
                    inside = (places < rows) & (sequences < BATCH)
                    found = total(sums, part, TILES)
                    if GATED:
                        gate = tl.load(gates + sequences, mask=sequences < BATCH, other=0.0)
                        found *= as_rounded(sigmoid(gate.to(tl.float32)), DTYPE)
                    tl.store(out + sequences * stride + places, found, mask=inside)
                sums = no_sums(ROWS, SEQUENCES, TILES)
