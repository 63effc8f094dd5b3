"""Projections that are added to the residual, or are terms of a sum."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import no_sums, place_of, plus_products, tiles_of, total, with_bias
from .numbers import rounded
from .weights import rows_of, weights_of


@triton.jit
def linear_residual(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCKS: tl.constexpr,
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
    for begin in range(0, BATCH, BLOCKS * SEQUENCES):
        sums = no_sums(ROWS, SEQUENCES, BLOCKS)
        for tile in tl.range(0, tiles_of(rows, WIDTH, ROWS, COLUMNS), num_stages=STAGES):
            row, column, is_last = place_of(tile, WIDTH, ROWS, COLUMNS)
            tiled = weights_of(
                weight, row, column, rows, WIDTH, WIDTH, ROWS, COLUMNS, DTYPE, FORMAT
            )
            sums = plus_products(
                sums, (tiled,), x, begin, x, (), column, WIDTH,
                WIDTH, False, BATCH, SEQUENCES, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for block in tl.static_range(BLOCKS):
                    sequences = begin + block * SEQUENCES + tl.arange(0, SEQUENCES)[None, :]
                    places = row + tl.arange(0, ROWS)[:, None]
                    inside = (places < rows) & (sequences < BATCH)
                    found = total(sums[block])
                    found = with_bias(found, bias + first + places, places < rows, BIAS)
                    at = sequences * stride + first + places
                    found += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
                    tl.store(out + at, rounded(found, DTYPE), mask=inside)
                sums = no_sums(ROWS, SEQUENCES, BLOCKS)


@triton.jit
def linear_terms(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCKS: tl.constexpr,
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
    out += first
    for begin in range(0, BATCH, BLOCKS * SEQUENCES):
        sums = no_sums(ROWS, SEQUENCES, BLOCKS)
        for tile in tl.range(0, tiles_of(rows, width, ROWS, COLUMNS), num_stages=STAGES):
            row, column, is_last = place_of(tile, width, ROWS, COLUMNS)
            tiled = weights_of(
                weight, row, column, rows, width, WIDTH, ROWS, COLUMNS, DTYPE, FORMAT
            )
            sums = plus_products(
                sums, (tiled,), x, begin, x, (), column, width,
                WIDTH, False, BATCH, SEQUENCES, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for block in tl.static_range(BLOCKS):
                    sequences = begin + block * SEQUENCES + tl.arange(0, SEQUENCES)[None, :]
                    places = row + tl.arange(0, ROWS)[:, None]
                    inside = (places < rows) & (sequences < BATCH)
                    tl.store(out + sequences * stride + places, total(sums[block]), mask=inside)
                sums = no_sums(ROWS, SEQUENCES, BLOCKS)
