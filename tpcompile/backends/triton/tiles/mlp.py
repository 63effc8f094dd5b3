"""Gate and up projections of the normed residual, and their activation."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, inverse_rms, row_dots, with_bias
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
    for sequence in range(BATCH):
        here = x + sequence * WIDTH
        inverse = inverse_rms(here, WIDTH, EPS, COLUMNS)
        for row in range(first, last, ROWS):
            skip = tl.cast(row, tl.int64) * WIDTH
            gates = row_dots(
                here, norm, inverse, gate + skip, last - row, WIDTH, WIDTH, True, DTYPE, COLUMNS
            )
            ups = row_dots(
                here, norm, inverse, up + skip, last - row, WIDTH, WIDTH, True, DTYPE, COLUMNS
            )
            gates = as_rounded(with_bias(gates, bias + row, last - row, BIAS), DTYPE)
            ups = as_rounded(with_bias(ups, bias + FFN + row, last - row, BIAS), DTYPE)
            active = as_rounded(gates / (1.0 + tl.exp(-gates)), DTYPE)
            places = row + tl.arange(0, ROWS)
            tl.store(
                out + sequence * stride + places, rounded(active * ups, DTYPE), mask=places < last
            )
