"""Projections that are added to the residual, or are terms of a sum."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, STAGES, add_tile, first_row, is_last, tiles_of, with_bias
from .numbers import rounded


@triton.jit
def linear_residual(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add some rows of a projection to the residual."""
    x = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_X), DTYPE)
    weight = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_WEIGHT), DTYPE)
    bias = weight
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_BIAS), DTYPE)
    residual = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_RESIDUAL), DTYPE)
    number = tl.load(words + abi.LINEAR_RESIDUAL_OUT)
    out = start_of(buffers, number, DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + abi.LINEAR_RESIDUAL_ROWS)
    last = tl.load(words + abi.LINEAR_RESIDUAL_ROWS + 1)
    rows = last - first
    weight += tl.cast(first, tl.int64) * WIDTH
    for sequence in range(BATCH):
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in tl.range(0, tiles_of(rows, WIDTH, COLUMNS), num_stages=STAGES):
            sums = add_tile(
                sums, tile, x + sequence * WIDTH, x, 1.0, weight, rows, WIDTH,
                WIDTH, False, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last(tile, WIDTH, COLUMNS):
                places = first_row(tile, WIDTH, COLUMNS) + tl.arange(0, ROWS)
                inside = places < rows
                found = with_bias(tl.sum(sums, 1), bias + first + places, inside, BIAS)
                at = sequence * stride + first + places
                found += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
                tl.store(out + at, rounded(found, DTYPE), mask=inside)


@triton.jit
def linear_terms(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute a term of each sum: some rows and columns of a projection."""
    start = tl.load(words + abi.LINEAR_TERMS_COLUMNS)
    width = tl.load(words + abi.LINEAR_TERMS_COLUMNS + 1) - start
    x = start_of(buffers, tl.load(words + abi.LINEAR_TERMS_X), DTYPE) + start
    weight = start_of(buffers, tl.load(words + abi.LINEAR_TERMS_WEIGHT), DTYPE) + start
    number = tl.load(words + abi.LINEAR_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32)
    out += tl.load(words + abi.LINEAR_TERMS_SLOT) * BATCH * stride
    first = tl.load(words + abi.LINEAR_TERMS_ROWS)
    last = tl.load(words + abi.LINEAR_TERMS_ROWS + 1)
    rows = last - first
    weight += tl.cast(first, tl.int64) * WIDTH
    out += first
    for sequence in range(BATCH):
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in tl.range(0, tiles_of(rows, width, COLUMNS), num_stages=STAGES):
            sums = add_tile(
                sums, tile, x + sequence * WIDTH, x, 1.0, weight, rows, width,
                WIDTH, False, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last(tile, width, COLUMNS):
                places = first_row(tile, width, COLUMNS) + tl.arange(0, ROWS)
                found = tl.sum(sums, 1)
                tl.store(out + sequence * stride + places, found, mask=places < rows)
