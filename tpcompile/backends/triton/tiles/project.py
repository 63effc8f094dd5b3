"""Projections that are added to the residual, or are terms of a sum."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, row_dots, with_bias
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
    for sequence in range(BATCH):
        for row in range(first, last, ROWS):
            here = weight + tl.cast(row, tl.int64) * WIDTH
            found = row_dots(
                x + sequence * WIDTH, x, 1.0, here, last - row, WIDTH,
                WIDTH, False, DTYPE, COLUMNS,
            )  # fmt: skip
            found = with_bias(found, bias + row, last - row, BIAS)
            places = row + tl.arange(0, ROWS)
            at = sequence * stride + places
            found += tl.load(residual + at, mask=places < last, other=0.0).to(tl.float32)
            tl.store(out + at, rounded(found, DTYPE), mask=places < last)


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
    for sequence in range(BATCH):
        for row in range(first, last, ROWS):
            here = weight + tl.cast(row, tl.int64) * WIDTH
            found = row_dots(
                x + sequence * WIDTH, x, 1.0, here, last - row, width,
                WIDTH, False, DTYPE, COLUMNS,
            )  # fmt: skip
            places = row + tl.arange(0, ROWS)
            tl.store(out + sequence * stride + places, found, mask=places < last)
