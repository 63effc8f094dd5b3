"""Gate and up projections of the normed residual, or up alone, and their activation."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, STAGES, add_tile, first_row, inverse_rms, is_last, tiles_of, with_bias
from .numbers import as_rounded, rounded


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Compute an activation of fp32 values."""
    if ACTIVATION == abi.ACTIVATION_SILU:
        found = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == abi.ACTIVATION_GELU:
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == abi.ACTIVATION_GELU_TANH:  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a))
        found = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == abi.ACTIVATION_RELU:
        found = tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(ACTIVATION == abi.ACTIVATION_RELU2)
        found = tl.where(x < 0.0, 0.0, x * x)
    return found


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
    activated_rows(
        *(words, buffers, abi.NORM_GATE_UP_SWIGLU_ROWS, BATCH, WIDTH, EPS, COLUMNS, FFN, BIAS),
        *(2, abi.ACTIVATION_SILU, DTYPE),
    )


@triton.jit
def norm_up_activation(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    SIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute act(gate) · up for some rows, or act(up)."""
    activated_rows(
        *(words, buffers, abi.NORM_UP_ACTIVATION_ROWS, BATCH, WIDTH, EPS, COLUMNS, FFN, BIAS),
        *(SIDES, ACTIVATION, DTYPE),
    )


@triton.jit
def activated_rows(
    words,
    buffers,
    OWN: tl.constexpr,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    SIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute some rows; `OWN` is the word of their range, after shared operands of one layout."""
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
    first = tl.load(words + OWN)
    last = tl.load(words + OWN + 1)
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
            if SIDES == 2:
                ups = add_tile(
                    ups, tile, here, norm, inverse, up, rows, WIDTH, WIDTH, True, DTYPE, COLUMNS
                )
            if is_last(tile, WIDTH, COLUMNS):
                places = first_row(tile, WIDTH, COLUMNS) + tl.arange(0, ROWS)
                inside = places < rows
                g = as_rounded(with_bias(tl.sum(gates, 1), bias + places, inside, BIAS), DTYPE)
                if SIDES == 2:
                    u = with_bias(tl.sum(ups, 1), bias + FFN + places, inside, BIAS)
                found = as_rounded(activated(g, ACTIVATION), DTYPE)
                if SIDES == 2:
                    found *= as_rounded(u, DTYPE)
                found = rounded(found, DTYPE)
                tl.store(out + sequence * stride + first + places, found, mask=inside)
