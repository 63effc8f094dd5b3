"""Products of weight rows with the values of all sequences, which may be normed first.

A tile of weights is loaded once for up to 64 sequences. The columns of a weight are in eight
slices, which have sums of their own: a sum adds the products of 16 columns at a time, in their
order. Then the sums of slices are added in order. So the bits depend neither on the other rows and
sequences, nor on the shape of tiles, the batch or the worker. In formats with scales, the sums of
16 columns are scaled before they are added.

For few sequences, each warp has a slice. For many, the warps share the sequences and take one
slice after the other, so several tiles have the same values and room for their sums.
"""

import triton
import triton.language as tl

from tpcompile.backends.triton.options import LEAST_SEQUENCES

from .numbers import INTERPRETED, scaled
from .weights import SLICES, STEP, at_once, chunks_of, columns_of

GROUP = tl.constexpr(LEAST_SEQUENCES)
"""The sequences that are normed at a time."""
_TOGETHER = tl.constexpr(2)
"""The groups of them that are loaded at a time."""
_CHUNK = tl.constexpr(512)
"""The columns that are normed at a time."""


@triton.jit
def inverse_rms(x, begin, SHAPE):
    """Return one over the root of the mean square of rows of `x[BATCH, WIDTH]`.

    It norms groups of sequences, so that the order of additions is that of every batch. Some groups
    are loaded at a time.
    """
    inverses = tl.zeros([SHAPE.SEQUENCES], tl.float32)
    together: tl.constexpr = min(SHAPE.SEQUENCES // GROUP, _TOGETHER)
    for first in range(0, tl.minimum(SHAPE.SEQUENCES, SHAPE.BATCH - begin), together * GROUP):
        sums = ()
        for group in tl.static_range(together):
            sums = sums + (_squares(x, begin + first + group * GROUP, SHAPE),)
        for group in tl.static_range(together):
            inverse = 1.0 / tl.sqrt(tl.sum(sums[group], 1) / SHAPE.WIDTH + SHAPE.EPS)
            sequences = first + group * GROUP + tl.arange(0, GROUP)
            matches = tl.arange(0, SHAPE.SEQUENCES)[:, None] == sequences[None, :]
            inverses += tl.sum(tl.where(matches, inverse[None, :], 0.0), 1)
    return inverses


@triton.jit
def _squares(x, first, SHAPE):
    """Return the sums of squares of a group of sequences, one chunk of columns after another."""
    sequences = first + tl.arange(0, GROUP)
    squares = tl.zeros([GROUP, _CHUNK], tl.float32)
    for start in tl.static_range(0, SHAPE.WIDTH, _CHUNK):
        columns = start + tl.arange(0, _CHUNK)
        inside = (sequences < SHAPE.BATCH)[:, None] & (columns < SHAPE.WIDTH)[None, :]
        places = sequences[:, None] * SHAPE.WIDTH + columns[None, :]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
    return squares


@triton.jit
def count_of(rows, width, SHAPE):
    """Return the number of loads of tiles for these rows and columns."""
    together: tl.constexpr = SHAPE.TILES * SHAPE.ROWS
    return (rows + together - 1) // together * chunks_of(width, SHAPE)


@triton.jit
def no_sums(COUNT: tl.constexpr, SHAPE):
    """Return the initial sums of some tiles.

    A tile has sums for all slices, or two: of one slice, and of all slices before it.
    """
    sums = ()
    if at_once(SHAPE.SEQUENCES):
        for _ in tl.static_range(COUNT):
            sums = sums + (tl.zeros([SLICES, SHAPE.ROWS, SHAPE.SEQUENCES], tl.float32),)
    else:
        for _ in tl.static_range(2 * COUNT):
            sums = sums + (tl.zeros([SHAPE.ROWS, SHAPE.SEQUENCES], tl.float32),)
    return sums


@triton.jit
def plus_products(sums, tiles, x, begin, norm, inverse, place, width, NORMED: tl.constexpr, SHAPE):
    """Add the products of tiles of weights with values of `x[BATCH, width]` to their sums.

    The tiles have the same columns.
    """
    sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
    there = sequences < SHAPE.BATCH
    return plus_gathered(
        sums, tiles, x, sequences, there, norm, inverse, place, width, NORMED, SHAPE
    )


@triton.jit
def plus_gathered(
    sums, tiles, x, sequences, there, norm, inverse, place, width, NORMED: tl.constexpr, SHAPE
):
    """Add the products with values of some rows of `x`, of which those not `there` are 0."""
    columns, here = columns_of(place, width, 1, SHAPE.COLUMNS)
    columns = tl.expand_dims(columns, len(columns.shape))
    here = tl.expand_dims(here, len(here.shape))
    values = tl.load(x + sequences * SHAPE.WIDTH + columns, mask=here & there, other=0.0)
    if NORMED:
        scale = tl.load(norm + columns, mask=here, other=0.0).to(tl.float32)
        values, inverse = values.to(tl.float32), inverse[None, :]
        values = scaled(values, inverse, scale, SHAPE.ZERO_CENTERED, SHAPE.DTYPE)
        values = values.to(SHAPE.DTYPE)
    steps = (values,)
    if len(tiles[0]) > 1:
        steps = parts_of(values, len(values.shape) - 2, values.shape[-2] // STEP)
    updated = ()
    for tile in tl.static_range(len(tiles)):
        updated = updated + (_plus(sums[tile], tiles[tile], steps),)
    if len(sums) > len(tiles):
        totals = ()
        for tile in tl.static_range(len(tiles)):
            totals = totals + (sums[len(tiles) + tile],)
        if place[2]:
            new_totals = ()
            zeros = ()
            for tile in tl.static_range(len(tiles)):
                # A plain addition would become a product that starts from the total.
                new_totals = new_totals + (tl.fma(updated[tile], 1.0, totals[tile]),)
                zeros = zeros + (tl.zeros(updated[tile].shape, tl.float32),)
            totals = new_totals
            updated = zeros
        updated = updated + totals
    return updated


@triton.jit
def _plus(sums, tile, steps):
    """Add the products of a tile of weights and values to sums."""
    if len(tile) == 1:
        sums = _plus_products(sums, tile[0], steps[0])
    else:
        weights = parts_of(tile[0], len(tile[0].shape) - 1, len(steps))
        scales = parts_of(tile[1], len(tile[1].shape) - 1, len(steps))
        for step in tl.static_range(len(steps)):
            scale = tl.broadcast_to(scales[step], sums.shape)
            # Triton prefetches only the operands of products, so zeros are computed from scales.
            products = _plus_products(0.0 * scale, weights[step], steps[step])
            sums = tl.fma(products, scale, sums)
    return sums


@triton.jit
def parts_of(values, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Return the parts of an axis, in order."""
    last = values.reshape(_in_three(values.shape, AXIS, COUNT)).permute(0, 2, 1)
    pieces = (last.reshape(_in_halves(last.shape)),)
    for _ in tl.static_range(_halvings(COUNT)):
        low = ()
        high = ()
        for part in tl.static_range(len(pieces)):
            even, odd = tl.split(pieces[part])
            low = low + (even,)
            high = high + (odd,)
        pieces = low + high
    parts = ()
    for part in tl.static_range(COUNT):
        parts = parts + (pieces[part].reshape(_part_of(values.shape, AXIS, COUNT)),)
    return parts


@triton.constexpr_function
def _in_three(shape, axis, count):
    """Return a shape of three dimensions: those before an axis, its parts, and the rest."""
    before, after = 1, 1
    for dim, extent in enumerate(shape):
        if dim < axis:
            before *= extent
        else:
            after *= extent
    return [before, count, after // count]


@triton.constexpr_function
def _halvings(count):
    return count.bit_length() - 1


@triton.constexpr_function
def _in_halves(shape):
    """Return a shape whose last dimension, a power of two, is halved as often as possible."""
    return [*shape[:-1], *([2] * (shape[-1].bit_length() - 1))]


@triton.constexpr_function
def _part_of(shape, axis, count):
    return [*shape[:axis], shape[axis] // count, *shape[axis + 1 :]]


@triton.jit
def _plus_products(sums, weights, values):
    """Add the products of weights and values to sums.

    The interpreter multiplies with a library, whose order of additions may depend on the place in a
    matrix, and which does not support bf16. In fp64 the order does not change the rounded result.
    """
    if INTERPRETED:
        wide = values.to(tl.float32).to(tl.float64)
        steps = tl.arange(0, weights.shape[-1])[None, :] // STEP
        for step in tl.static_range(weights.shape[-1] // STEP):
            part = tl.where(steps == step, weights.to(tl.float32), 0.0).to(tl.float64)
            sums += tl.dot(part, wide, out_dtype=tl.float64).to(tl.float32)
    else:
        sums = tl.dot(weights, values, sums, input_precision="ieee")
    return sums


@triton.jit
def total(sums, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Return the sums of one tile, `[ROWS, SEQUENCES]`: slices are added in order."""
    if len(sums) > COUNT:
        tile_sums = sums[COUNT + TILE]
    else:
        slices = parts_of(sums[TILE], 0, SLICES)
        tile_sums = tl.zeros(sums[TILE].shape[1:], tl.float32)
        for part in tl.static_range(SLICES):
            tile_sums += slices[part].reshape(tile_sums.shape)
    return tile_sums


@triton.jit
def with_bias(sums, bias, inside, SHAPE):
    """Add the bias of the rows, if there is one; `bias` has a place for each of them."""
    if SHAPE.BIAS:
        sums += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return sums
