"""Projections that are added to the residual, or are terms of a sum."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, no_sums, plus_products, total, with_bias
from .numbers import as_rounded, rounded, sigmoid
from .weights import place_of, rows_of, tiles_of


@triton.jit
def linear_residual(words, buffers, scratch, SHAPE):
    """Add some rows of a projection to the residual."""
    x = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_X), SHAPE.DTYPE)
    bias = x
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_BIAS), SHAPE.DTYPE)
    residual = start_of(buffers, tl.load(words + abi.LINEAR_RESIDUAL_RESIDUAL), SHAPE.DTYPE)
    number = tl.load(words + abi.LINEAR_RESIDUAL_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + abi.LINEAR_RESIDUAL_ROWS)
    last = tl.load(words + abi.LINEAR_RESIDUAL_ROWS + 1)
    rows = last - first
    number = tl.load(words + abi.LINEAR_RESIDUAL_WEIGHT)
    weight = rows_of(buffers, number, first, 0, SHAPE)
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        sums = no_sums(SHAPE.TILES, SHAPE)
        count = count_of(rows, SHAPE.WIDTH, SHAPE)
        for tile in tl.range(0, count, num_stages=SHAPE.STAGES):
            row, place, is_last = place_of(tile, SHAPE.WIDTH, SHAPE)
            tiles = tiles_of(weight, row, rows, place, SHAPE.WIDTH, SHAPE)
            sums = plus_products(sums, tiles, x, begin, x, 0.0, place, SHAPE.WIDTH, False, SHAPE)
            if is_last:
                for part in tl.static_range(SHAPE.TILES):
                    sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
                    places = row + part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
                    inside = (places < rows) & (sequences < SHAPE.BATCH)
                    values = total(sums, part, SHAPE.TILES)
                    values = with_bias(values, bias + first + places, places < rows, SHAPE)
                    offsets = sequences * stride + first + places
                    values += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
                    tl.store(out + offsets, rounded(values, SHAPE.DTYPE), mask=inside)
                sums = no_sums(SHAPE.TILES, SHAPE)


@triton.jit
def linear_terms(words, buffers, scratch, SHAPE):
    """Compute a term of each sum: some rows and columns of a projection."""
    start = tl.load(words + abi.LINEAR_TERMS_COLUMNS)
    width = tl.load(words + abi.LINEAR_TERMS_COLUMNS + 1) - start
    x = start_of(buffers, tl.load(words + abi.LINEAR_TERMS_X), SHAPE.DTYPE) + start
    number = tl.load(words + abi.LINEAR_TERMS_OUT)
    stride = stride_of(buffers, number, 0)
    out = start_of(buffers, number, tl.float32)
    out += tl.load(words + abi.LINEAR_TERMS_SLOT) * SHAPE.BATCH * stride
    first = tl.load(words + abi.LINEAR_TERMS_ROWS)
    last = tl.load(words + abi.LINEAR_TERMS_ROWS + 1)
    rows = last - first
    number = tl.load(words + abi.LINEAR_TERMS_WEIGHT)
    weight = rows_of(buffers, number, first, start, SHAPE)
    store_terms(x, weight, x, out + first, stride, rows, width, False, SHAPE)


@triton.jit
def store_terms(x, weight, gates, out, stride, rows, width, GATED: tl.constexpr, SHAPE):
    """Store terms at `out[BATCH, stride]`; if GATED, times the sigmoid of each sequence's gate.

    `weight` and `out` begin with the first of the rows, `weight` and `x` with that of the columns.
    """
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        sums = no_sums(SHAPE.TILES, SHAPE)
        count = count_of(rows, width, SHAPE)
        for tile in tl.range(0, count, num_stages=SHAPE.STAGES):
            row, place, is_last = place_of(tile, width, SHAPE)
            tiles = tiles_of(weight, row, rows, place, width, SHAPE)
            sums = plus_products(sums, tiles, x, begin, x, 0.0, place, width, False, SHAPE)
            if is_last:
                for part in tl.static_range(SHAPE.TILES):
                    sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
                    places = row + part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
                    inside = (places < rows) & (sequences < SHAPE.BATCH)
                    terms = total(sums, part, SHAPE.TILES)
                    if GATED:
                        gate = tl.load(gates + sequences, mask=sequences < SHAPE.BATCH, other=0.0)
                        terms *= as_rounded(sigmoid(gate.to(tl.float32)), SHAPE.DTYPE)
                    tl.store(out + sequences * stride + places, terms, mask=inside)
                sums = no_sums(SHAPE.TILES, SHAPE)
