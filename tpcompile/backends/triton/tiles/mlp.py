"""Gate and up projections of the normed residual, or up alone, and their activation."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import count_of, inverse_rms, no_sums, plus_products, total, with_bias
from .numbers import as_rounded, rounded
from .weights import place_of, rows_of, tiles_of


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Compute an activation of fp32 values."""
    if ACTIVATION == abi.ACTIVATION_SILU:
        activations = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == abi.ACTIVATION_GELU:
        activations = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == abi.ACTIVATION_GELU_TANH:  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a))
        activations = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == abi.ACTIVATION_RELU:
        activations = tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(ACTIVATION == abi.ACTIVATION_RELU2)
        activations = tl.where(x < 0.0, 0.0, x * x)
    return activations


@triton.jit
def norm_gate_up_swiglu(words, buffers, scratch, SHAPE):
    """Compute silu(gate) · up for some rows."""
    activated_rows(words, buffers, abi.NORM_GATE_UP_SWIGLU_ROWS, SHAPE)


@triton.jit
def norm_up_activation(words, buffers, scratch, SHAPE):
    """Compute act(gate) · up for some rows, or act(up)."""
    activated_rows(words, buffers, abi.NORM_UP_ACTIVATION_ROWS, SHAPE)


@triton.jit
def activated_rows(words, buffers, OWN: tl.constexpr, SHAPE):
    """Compute some rows; `OWN` is the word of their range, after shared operands of one layout."""
    x = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_X), SHAPE.DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_WEIGHT), SHAPE.DTYPE)
    bias = norm
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_BIAS), SHAPE.DTYPE)
    number = tl.load(words + abi.NORM_GATE_UP_SWIGLU_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + OWN)
    last = tl.load(words + OWN + 1)
    rows = last - first
    number = tl.load(words + abi.NORM_GATE_UP_SWIGLU_WEIGHT)
    gate = rows_of(buffers, number, first, 0, SHAPE)
    up = rows_of(buffers, number, SHAPE.FFN + first, 0, SHAPE)
    bias += first
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        inverse = inverse_rms(x, begin, SHAPE)
        sums = no_sums(SHAPE.TILES * SHAPE.SIDES, SHAPE)
        count = count_of(rows, SHAPE.WIDTH, SHAPE)
        for tile in tl.range(0, count, num_stages=SHAPE.STAGES):
            row, place, is_last = place_of(tile, SHAPE.WIDTH, SHAPE)
            tiles = tiles_of(gate, row, rows, place, SHAPE.WIDTH, SHAPE)
            if SHAPE.SIDES == 2:
                tiles += tiles_of(up, row, rows, place, SHAPE.WIDTH, SHAPE)
            sums = plus_products(
                sums, tiles, x, begin, norm, inverse, place, SHAPE.WIDTH, True, SHAPE
            )
            if is_last:
                for part in tl.static_range(SHAPE.TILES):
                    sequences = begin + tl.arange(0, SHAPE.SEQUENCES)[None, :]
                    places = row + part * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)[:, None]
                    inside = places < rows
                    values = total(sums, part, SHAPE.SIDES * SHAPE.TILES)
                    values = as_rounded(
                        with_bias(values, bias + places, inside, SHAPE), SHAPE.DTYPE
                    )
                    values = as_rounded(activated(values, SHAPE.ACTIVATION), SHAPE.DTYPE)
                    if SHAPE.SIDES == 2:
                        up_values = total(sums, SHAPE.TILES + part, SHAPE.SIDES * SHAPE.TILES)
                        up_values = with_bias(up_values, bias + SHAPE.FFN + places, inside, SHAPE)
                        values *= as_rounded(up_values, SHAPE.DTYPE)
                    offsets = sequences * stride + first + places
                    inside = inside & (sequences < SHAPE.BATCH)
                    tl.store(out + offsets, rounded(values, SHAPE.DTYPE), mask=inside)
                sums = no_sums(SHAPE.TILES * SHAPE.SIDES, SHAPE)
