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
    for first in tl.static_range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        values = tl.load(x + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + EPS)


@triton.jit
def tiles_of(rows, width, COLUMNS: tl.constexpr):
    """Return the number of tiles of so many rows and columns."""
    return (rows + ROWS - 1) // ROWS * ((width + COLUMNS - 1) // COLUMNS)


@triton.jit
def add_tile(
    sums,
    tile,
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
    """Add the products of a tile of `weight[rows, width]` with `x[width]` to the sums of its rows.

    Tiles are in the order of rows, then of columns; the sums begin again with each block of rows.
    One loop over all tiles can load the next ones while it multiplies.
    """
    chunks = (width + COLUMNS - 1) // COLUMNS
    row = tile // chunks * ROWS
    first = tile % chunks * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    inside = columns < width
    values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
        values = scaled(values, inverse, scale, DTYPE)
    own = tl.arange(0, ROWS)
    found = tl.load(
        weight + tl.cast(row, tl.int64) * STRIDE + own[:, None] * STRIDE + columns[None, :],
        mask=(own < rows - row)[:, None] & inside[None, :],
        other=0.0,
    )
    return tl.where(first == 0, 0.0, sums) + found.to(tl.float32) * values[None, :]


@triton.jit
def is_last(tile, width, COLUMNS: tl.constexpr):
    """Return whether a tile completes the sums of its rows."""
    chunks = (width + COLUMNS - 1) // COLUMNS
    return tile % chunks == chunks - 1


@triton.jit
def first_row(tile, width, COLUMNS: tl.constexpr):
    """Return the first row of a tile."""
    return tile // ((width + COLUMNS - 1) // COLUMNS) * ROWS


@triton.jit
def with_bias(sums, bias, inside, BIAS: tl.constexpr):
    """Add the bias of the rows, if there is one; `bias` has a place for each of them."""
    if BIAS:
        sums += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return sums
