"""Gate and up projections of the normed residual, and their activation."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, STAGES, add_tile, first_row, inverse_rms, is_last, tiles_of, with_bias
from .numbers import as_rounded, rounded


@triton.jit
def norm_gate_up_swiglu(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute silu(gate) · up for some rows."""
    x = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_X), DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_WEIGHT), DTYPE)
    gate = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_WEIGHT), DTYPE)
    bias = gate
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_BIAS), DTYPE)
    up = gate + FFN * WIDTH
    number = tl.load(words + abi.NORM_GATE_UP_SWIGLU_OUT)
    out = start_of(buffers, number, DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + abi.NORM_GATE_UP_SWIGLU_ROWS)
    last = tl.load(words + abi.NORM_GATE_UP_SWIGLU_ROWS + 1)
    rows = last - first
    skip = tl.cast(first, tl.int64) * WIDTH
    gate += skip
    up += skip
    bias += first
    for sequence in range(BATCH):
        here = x + sequence * WIDTH
        inverse = inverse_rms(here, WIDTH, EPS, COLUMNS)
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in tl.range(0, tiles_of(rows, WIDTH, COLUMNS), num_stages=STAGES):
            gates = add_tile(
                gates, tile, here, norm, inverse, gate, rows, WIDTH, WIDTH, True, DTYPE, COLUMNS
            )
            ups = add_tile(
                ups, tile, here, norm, inverse, up, rows, WIDTH, WIDTH, True, DTYPE, COLUMNS
            )
            if is_last(tile, WIDTH, COLUMNS):
                places = first_row(tile, WIDTH, COLUMNS) + tl.arange(0, ROWS)
                inside = places < rows
                g = as_rounded(with_bias(tl.sum(gates, 1), bias + places, inside, BIAS), DTYPE)
                u = with_bias(tl.sum(ups, 1), bias + FFN + places, inside, BIAS)
                active = as_rounded(g / (1.0 + tl.exp(-g)), DTYPE)
                found = rounded(active * as_rounded(u, DTYPE), DTYPE)
                tl.store(out + sequence * stride + first + places, found, mask=inside)
