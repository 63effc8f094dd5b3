"""Products of weight rows with the values of all sequences, which may be normed first.

A tile of weights is loaded once for up to 64 sequences. Its columns are in slices, which have sums
of their own: a sum adds the products of 16 columns at a time, in their order. So its bits depend
neither on the other rows and sequences, nor on the shape of tiles, the batch or the worker. In
formats with scales, the sums of 16 columns are scaled before they are added.
"""

import triton
import triton.language as tl

from tpcompile.backends.triton.options import LEAST_SEQUENCES

from .numbers import INTERPRETED, scaled
from .weights import SLICES, STEP, columns_of

GROUP = tl.constexpr(LEAST_SEQUENCES)
"""The sequences that are normed at a time."""
_CHUNK = tl.constexpr(512)
"""The columns that are normed at a time."""


@triton.jit
def inverse_rms(
    x,
    begin,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
):
    """Return one over the root of the mean square of rows of `x[BATCH, WIDTH]`, by block."""
    found = ()
    for block in tl.static_range(BLOCKS):
        found = found + (_inverses(x, begin + block * SEQUENCES, BATCH, SEQUENCES, WIDTH, EPS),)
    return found


@triton.jit
def _inverses(
    x, begin, BATCH: tl.constexpr, SEQUENCES: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr
):
    """Norm some sequences at a time, so that the order of additions is that of every batch."""
    found = tl.zeros([SEQUENCES], tl.float32)
    for first in range(0, tl.minimum(SEQUENCES, BATCH - begin), GROUP):
        sequences = begin + first + tl.arange(0, GROUP)
        squares = tl.zeros([GROUP, _CHUNK], tl.float32)
        for start in tl.static_range(0, WIDTH, _CHUNK):
            columns = start + tl.arange(0, _CHUNK)
            inside = (sequences < BATCH)[:, None] & (columns < WIDTH)[None, :]
            places = sequences[:, None] * WIDTH + columns[None, :]
            values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            squares += values * values
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + EPS)
        own = tl.arange(0, SEQUENCES)[:, None] == first + tl.arange(0, GROUP)[None, :]
        found += tl.sum(tl.where(own, inverse[None, :], 0.0), 1)
    return found


@triton.jit
def tiles_of(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the number of tiles of so many rows and columns."""
    return (rows + ROWS - 1) // ROWS * ((width + COLUMNS - 1) // COLUMNS)


@triton.jit
def no_sums(ROWS: tl.constexpr, SEQUENCES: tl.constexpr, COUNT: tl.constexpr):
    """Return so many sums before the first tile of their rows."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([SLICES, ROWS, SEQUENCES], tl.float32),)
    return found


@triton.jit
def plus_products(
    sums,
    tiles,
    x,
    begin,
    norm,
    inverses,
    first,
    width,
    STRIDE: tl.constexpr,
    NORMED: tl.constexpr,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the products of tiles of weights with values to their sums: those of block by block.

    The tiles have the same columns, which begin with `first`, of `x[BATCH, width]`.
    """
    found = ()
    columns = first + columns_of(COLUMNS, tiles[0][0].shape[0])[:, :, None]
    for block in tl.static_range(len(sums) // len(tiles)):
        here = begin + block * SEQUENCES
        values = _values(x, here, columns, width, STRIDE, BATCH, SEQUENCES)
        if NORMED:
            values = _normed(values, inverses[block], norm, columns, width, DTYPE)
        for side in tl.static_range(len(tiles)):
            found = found + (_plus(sums[block * len(tiles) + side], tiles[side], values),)
    return found


@triton.jit
def _plus(sums, tile, values):
    """Add the products of a tile of weights and values to sums."""
    weights = tile[0]
    if len(tile) == 1:
        sums = _plus_products(sums, weights, values)
    else:
        shape: tl.constexpr = [weights.shape[0], weights.shape[1], values.shape[2]]
        scales = tl.broadcast_to(tile[1], shape)
        # Triton loads ahead only what a product reads, so zeros are made of scales.
        found = _plus_products(0.0 * scales, weights, values)
        for step in tl.static_range(weights.shape[0] // SLICES):
            sums = tl.fma(_of_step(found, step), _of_step(scales, step), sums)
    return sums


@triton.jit
def _of_step(found, step: tl.constexpr):
    """Return what 16 columns of each slice have, of runs in the order of columns."""
    if found.shape[0] > SLICES:
        each = found.reshape(found.shape[0] // SLICES, SLICES, found.shape[1], found.shape[2])
        steps = tl.arange(0, each.shape[0])[:, None, None, None]
        found = tl.sum(tl.where(steps == step, each, 0.0), 0)
    return found


@triton.jit
def _plus_products(sums, weights, values):
    """Add the products of weights and values to sums.

    The interpreter multiplies with a library, whose order of additions may depend on the place in a
    matrix, and which does not know bf16. In fp64 the order does not show in what is rounded.
    """
    if INTERPRETED:
        wide = values.to(tl.float32).to(tl.float64)
        steps = tl.arange(0, weights.shape[2])[None, None, :] // STEP
        for step in tl.static_range(weights.shape[2] // STEP):
            part = tl.where(steps == step, weights.to(tl.float32), 0.0).to(tl.float64)
            sums += tl.dot(part, wide, out_dtype=tl.float64).to(tl.float32)
    else:
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _values(
    x,
    begin,
    columns,
    width,
    STRIDE: tl.constexpr,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Load the values of sequences in the columns of a tile: `[slices, columns, SEQUENCES]`."""
    sequences = begin + tl.arange(0, SEQUENCES)[None, None, :]
    inside = (columns < width) & (sequences < BATCH)
    return tl.load(x + sequences * STRIDE + columns, mask=inside, other=0.0)


@triton.jit
def _normed(values, inverse, norm, columns, width, DTYPE: tl.constexpr):
    """Norm the values of a tile."""
    scale = tl.load(norm + columns, mask=columns < width, other=0.0).to(tl.float32)
    return scaled(values.to(tl.float32), inverse[None, None, :], scale, DTYPE).to(DTYPE)


@triton.jit
def place_of(tile, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and the first column of a tile, and whether it is the last of its rows.

    Tiles are in the order of rows, then of columns. One loop over all tiles can load the next ones
    while it multiplies.
    """
    chunks = (width + COLUMNS - 1) // COLUMNS
    chunk = tile % chunks
    return tile // chunks * ROWS, chunk * COLUMNS, chunk == chunks - 1


@triton.jit
def total(sums):
    """Add up the slices of sums; return `[ROWS, SEQUENCES]`."""
    return tl.sum(sums, 0)


@triton.jit
def with_bias(sums, bias, inside, BIAS: tl.constexpr):
    """Add the bias of the rows, if there is one; `bias` has a place for each of them."""
    if BIAS:
        sums += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return sums
