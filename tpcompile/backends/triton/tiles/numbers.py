"""Rounding of fp32 values to the dtype of the model."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """Round fp32 values to the nearest of a dtype, ties to even.

    Casts do so on a GPU, but Triton's interpreter cuts bits off in bf16.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        nearest = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        nearest = values.to(DTYPE)
    return nearest


@triton.jit
def as_rounded(values, DTYPE: tl.constexpr):
    """Return fp32 values rounded to a dtype, as fp32."""
    return rounded(values, DTYPE).to(tl.float32)


@triton.jit
def scaled(values, inverse, scale, ZERO_CENTERED: tl.constexpr, DTYPE: tl.constexpr):
    """Norm values and scale them, rounded as Hugging Face rounds.

    The scale of a zero-centred norm is one more, and only the product is rounded.
    """
    if ZERO_CENTERED:
        normed = as_rounded(values * inverse * (1.0 + scale), DTYPE)
    else:
        normed = as_rounded(as_rounded(values * inverse, DTYPE) * scale, DTYPE)
    return normed


@triton.jit
def sigmoid(x):
    """Compute the sigmoid of fp32 values."""
    return 1.0 / (1.0 + tl.exp(-x))
