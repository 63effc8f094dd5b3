"""The choice of the experts of a sequence, and their scores."""

import triton
import triton.language as tl

from . import abi
from .access import start_of
from .numbers import rounded

_LOW = tl.constexpr(32)
"""The bits of a key that hold a place."""
_LAST = tl.constexpr(2**31 - 1)
_TAKEN = tl.constexpr(-(2**63))
"""A key below those of all logits."""


@triton.jit
def top_experts(words, buffers, scratch, SHAPE):
    """Choose the experts of a sequence: of equal logits, that of the lower number comes first."""
    sequence = tl.load(words + abi.TOP_EXPERTS_SEQUENCE)
    logits = start_of(buffers, tl.load(words + abi.TOP_EXPERTS_LOGITS), SHAPE.DTYPE)
    logits += sequence * SHAPE.EXPERTS
    scores = start_of(buffers, tl.load(words + abi.TOP_EXPERTS_SCORES), SHAPE.DTYPE)
    scores += sequence * SHAPE.CHOSEN
    ids = start_of(buffers, tl.load(words + abi.TOP_EXPERTS_IDS), tl.int32)
    ids += sequence * SHAPE.CHOSEN
    lengths = start_of(buffers, tl.load(words + abi.TOP_EXPERTS_LENGTHS), tl.int32)
    experts = tl.arange(0, SHAPE.PLACES)
    inside = experts < SHAPE.EXPERTS
    values = tl.load(logits + experts, mask=inside, other=float("-inf")).to(tl.float32)
    keys = _order_of(values).to(tl.int64) << _LOW | (_LAST - experts)
    keys = tl.where(inside, keys, _TAKEN)
    places = tl.arange(0, SHAPE.CHOICES)
    chosen = tl.zeros([SHAPE.CHOICES], tl.int64)
    for place in range(SHAPE.CHOSEN):
        best = tl.max(keys, 0)
        chosen = tl.where(places == place, best, chosen)
        keys = tl.where(keys == best, _TAKEN, keys)
    numbers = _LAST - (chosen & _LAST).to(tl.int32)
    tops = _logit_of((chosen >> _LOW).to(tl.int32))
    highest = tl.sum(tl.where(places == 0, tops, 0.0), 0)
    all_shares = tl.sum(tl.where(inside, tl.exp(values - highest), 0.0), 0)
    shares = tl.where(places < SHAPE.CHOSEN, tl.exp(tops - highest) / all_shares, 0.0)
    if SHAPE.NORMALIZED:
        shares = shares / tl.sum(shares, 0)
    tl.store(scores + places, rounded(shares, SHAPE.DTYPE), mask=places < SHAPE.CHOSEN)
    numbers = tl.where(tl.load(lengths + sequence) == 0, abi.NONE, numbers)
    tl.store(ids + places, numbers, mask=places < SHAPE.CHOSEN)


@triton.jit
def _order_of(logits):
    """Return numbers in the order of logits, in which NaN is above all others."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(logits != logits, _LAST, _flipped(bits))


@triton.jit
def _logit_of(order):
    """Return the logits of numbers in their order."""
    return _flipped(order).to(tl.float32, bitcast=True)


@triton.jit
def _flipped(bits):
    """Reverse the order of negative numbers."""
    return tl.where(bits < 0, bits ^ _LAST, bits)
