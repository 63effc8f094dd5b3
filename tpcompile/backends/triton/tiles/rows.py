"""Rows of a linear of the normed residual; heads and logits use `store_rows` too."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, inverse_rms, no_sums, plus_products, total, with_bias
from .numbers import rounded
from .weights import place_of, rows_of, tiles_of


@triton.jit
def norm_rows(words, buffers, scratch, SHAPE):
    """Compute some rows of a linear, for linear attention or for gates of attention."""
    x = start_of(buffers, tl.load(words + abi.NORM_ROWS_NORMED_X), SHAPE.DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_ROWS_NORMED_WEIGHT), SHAPE.DTYPE)
    first = tl.load(words + abi.NORM_ROWS_ROWS)
    rows = tl.load(words + abi.NORM_ROWS_ROWS + 1) - first
    bias = norm
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_ROWS_BIAS), SHAPE.DTYPE) + first
    number = tl.load(words + abi.NORM_ROWS_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE) + first
    stride = stride_of(buffers, number, 0)
    number = tl.load(words + abi.NORM_ROWS_WEIGHT)
    weight = rows_of(buffers, number, first, 0, SHAPE)
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        store_rows(x, norm, weight, bias, out, stride, rows, begin, SHAPE)


@triton.jit
def store_rows(x, norm, weight, bias, out, stride, rows, begin, SHAPE):
    """Store rows of a linear at `out[BATCH, stride]`, for the SEQUENCES from `begin` on.

    `weight`, `bias` and `out` begin with the first of the rows.
    """
    inverse = inverse_rms(x, begin, SHAPE)
    sums = no_sums(SHAPE.TILES, SHAPE)
    count = count_of(rows, SHAPE.WIDTH, SHAPE)
    for tile in tl.range(0, count, num_stages=SHAPE.STAGES):
        row, place, is_last = place_of(tile, SHAPE.WIDTH, SHAPE)
        tiles = tiles_of(weight, row, rows, place, SHAPE.WIDTH, SHAPE)
        sums = plus_products(sums, tiles, x, begin, norm, inverse, place, SHAPE.WIDTH, True, SHAPE)
        if is_last:
            for part in tl.static_range(SHAPE.TILES):
                sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
                places = row + part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
                values = total(sums, part, SHAPE.TILES)
                values = with_bias(values, bias + places, places < rows, SHAPE)
                inside = (places < rows) & (sequences < SHAPE.BATCH)
                addresses = out + sequences * stride + places
                tl.store(addresses, rounded(values, SHAPE.DTYPE), mask=inside)
            sums = no_sums(SHAPE.TILES, SHAPE)
