"""Products of weight rows with a vector, which may be normed first.

A row's sum does not depend on the other rows of its tile, on the sequence or on the worker, so
neither do its bits.
"""

import triton
import triton.language as tl

from .numbers import scaled

ROWS = tl.constexpr(16)
"""The rows of a tile."""
STAGES = tl.constexpr(3)
"""The tiles of weights that are in shared memory: one in use, the others on their way."""


@triton.jit
def inverse_rms(x, WIDTH: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return one over the root of the mean square of `x[WIDTH]`."""
    squares = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        values = tl.load(x + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + EPS)


@triton.jit
def row_dots(
    x,
    norm,
    inverse,
    weight,
    rows,
    width,
    STRIDE: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply `rows` rows at `weight`, at most ROWS, by `x[width]`; return ROWS sums in fp32."""
    row = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
            values = scaled(values, inverse, scale, DTYPE)
        tile = tl.load(
            weight + row[:, None] * STRIDE + columns[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        sums += tile.to(tl.float32) * values[None, :]
    return tl.sum(sums, 1)


@triton.jit
def with_bias(sums, bias, rows, BIAS: tl.constexpr):
    """Add the bias of the rows, if there is one."""
    if BIAS:
        row = tl.arange(0, ROWS)
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    return sums
