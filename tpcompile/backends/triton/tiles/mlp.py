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
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute silu(gate) · up for some rows."""
    activated_rows(
        *(words, buffers, abi.NORM_GATE_UP_SWIGLU_ROWS, BATCH, SEQUENCES, TILES),
        *(ROWS, COLUMNS, STAGES),
        *(WIDTH, EPS, ZERO_CENTERED, FFN, BIAS, 2, abi.ACTIVATION_SILU, DTYPE, FORMAT),
    )


@triton.jit
def norm_up_activation(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    SIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute act(gate) · up for some rows, or act(up)."""
    activated_rows(
        *(words, buffers, abi.NORM_UP_ACTIVATION_ROWS, BATCH, SEQUENCES, TILES),
        *(ROWS, COLUMNS, STAGES),
        *(WIDTH, EPS, ZERO_CENTERED, FFN, BIAS, SIDES, ACTIVATION, DTYPE, FORMAT),
    )


@triton.jit
def activated_rows(
    words,
    buffers,
    OWN: tl.constexpr,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FFN: tl.constexpr,
    BIAS: tl.constexpr,
    SIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute some rows; `OWN` is the word of their range, after shared operands of one layout."""
    x = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_X), DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_NORMED_WEIGHT), DTYPE)
    bias = norm
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_GATE_UP_SWIGLU_BIAS), DTYPE)
    number = tl.load(words + abi.NORM_GATE_UP_SWIGLU_OUT)
    out = start_of(buffers, number, DTYPE)
    stride = stride_of(buffers, number, 0)
    first = tl.load(words + OWN)
    last = tl.load(words + OWN + 1)
    rows = last - first
    number = tl.load(words + abi.NORM_GATE_UP_SWIGLU_WEIGHT)
    gate = rows_of(buffers, number, first, 0, WIDTH, DTYPE, FORMAT)
    up = rows_of(buffers, number, FFN + first, 0, WIDTH, DTYPE, FORMAT)
    bias += first
    for begin in range(0, BATCH, SEQUENCES):
        inverse = inverse_rms(x, begin, BATCH, SEQUENCES, WIDTH, EPS)
        sums = no_sums(ROWS, SEQUENCES, TILES * SIDES)
        count = count_of(rows, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
        for tile in tl.range(0, count, num_stages=STAGES):
            row, place, is_last = place_of(tile, WIDTH, TILES * ROWS, COLUMNS, SEQUENCES)
            tiles = tiles_of(
                gate, row, rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
            )
            if SIDES == 2:
                tiles += tiles_of(
                    up, row, rows, place, WIDTH, WIDTH, TILES, ROWS, COLUMNS, DTYPE, FORMAT
                )
            sums = plus_products(
                sums, tiles, x, begin, norm, inverse, place, WIDTH,
                WIDTH, True, ZERO_CENTERED, BATCH, SEQUENCES, DTYPE, COLUMNS,
            )  # fmt: skip
            if is_last:
                for part in tl.static_range(TILES):
                    sequences = begin + tl.arange(0, SEQUENCES)[None, :]
                    places = row + part * ROWS + tl.arange(0, ROWS)[:, None]
                    inside = places < rows
                    found = total(sums, part, SIDES * TILES)
                    found = as_rounded(with_bias(found, bias + places, inside, BIAS), DTYPE)
                    found = as_rounded(activated(found, ACTIVATION), DTYPE)
                    if SIDES == 2:
                        u = total(sums, TILES + part, SIDES * TILES)
                        found *= as_rounded(with_bias(u, bias + FFN + places, inside, BIAS), DTYPE)
                    at = sequences * stride + first + places
                    inside = inside & (sequences < BATCH)
                    tl.store(out + at, rounded(found, DTYPE), mask=inside)
                sums = no_sums(ROWS, SEQUENCES, TILES * SIDES)
