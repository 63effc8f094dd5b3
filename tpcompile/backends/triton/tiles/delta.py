"""A step of linear attention: the convolution, the state and the gated results of a key head.

A state is in registers while it decays and is updated, so it is read once and written once.
"""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .mlp import activated
from .numbers import as_rounded, rounded, scaled, sigmoid

_EPSILON = tl.constexpr(1e-6)
_LINEAR = tl.constexpr(20.0)
"""Softplus of larger values is the value itself."""


@triton.jit
def delta_step(words, buffers, scratch, SHAPE):
    """Compute the value heads of a sequence that read one key head."""
    sequence = tl.load(words + abi.DELTA_STEP_SEQUENCE)
    lengths = start_of(buffers, tl.load(words + abi.DELTA_STEP_LENGTHS), tl.int32)
    length = tl.load(lengths + sequence)
    if length > 0:
        _step(words, buffers, scratch, sequence, length > 1, SHAPE)


@triton.jit
def _step(words, buffers, scratch, sequence, resumes, SHAPE):
    """Compute the heads of a sequence, which `resumes` from a state unless it is new.

    The state of a new sequence is zero, whatever is in memory. Query, key and value pass through
    the worker's scratch memory: otherwise each thread would convolve all channels that it needs.
    """
    old, new = _states_of(words, buffers, sequence)
    number = tl.load(words + abi.DELTA_STEP_PROJECTED)
    inputs = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
    number = tl.load(words + abi.DELTA_STEP_Z)
    gates = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
    gates += tl.load(words + abi.DELTA_STEP_FIRST_Z)
    number = tl.load(words + abi.DELTA_STEP_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0)
    norm = start_of(buffers, tl.load(words + abi.DELTA_STEP_NORM), SHAPE.DTYPE)
    number = tl.load(words + abi.DELTA_STEP_STATES)
    states = start_of(buffers, number, tl.float32)
    states += tl.load(words + abi.DELTA_STEP_LAYER) * stride_of(buffers, number, 0)
    stride = stride_of(buffers, number, 1)

    keys = tl.arange(0, SHAPE.PLACES)
    lanes = tl.arange(0, SHAPE.LANES)
    inside = lanes < SHAPE.VALUE
    first = tl.load(words + abi.DELTA_STEP_K_HEAD) * SHAPE.KEY
    q = _convolved(words, buffers, inputs, old, new, resumes, first + keys, keys < SHAPE.KEY, SHAPE)
    first += tl.load(words + abi.DELTA_STEP_FIRST_K)
    k = _convolved(words, buffers, inputs, old, new, resumes, first + keys, keys < SHAPE.KEY, SHAPE)
    tl.store(scratch + keys, _normalized(q) * SHAPE.KEY**-0.5)
    tl.store(scratch + SHAPE.PLACES + keys, _normalized(k))
    tl.debug_barrier()
    first = tl.load(words + abi.DELTA_STEP_HEADS)
    last = tl.load(words + abi.DELTA_STEP_HEADS + 1)
    for head in range(first, last):
        whole = (keys < SHAPE.KEY)[:, None] & inside[None, :]
        places = keys[:, None] * SHAPE.VALUE + lanes[None, :]
        source = _state_at(states + old * stride, head, SHAPE)
        state = tl.load(source + places, mask=whole & resumes, other=0.0)
        column = head * SHAPE.VALUE + lanes
        first_v = tl.load(words + abi.DELTA_STEP_FIRST_V)
        v = _convolved(words, buffers, inputs, old, new, resumes, first_v + column, inside, SHAPE)
        tl.store(scratch + 2 * SHAPE.PLACES + lanes, v)
        tl.debug_barrier()
        v = tl.load(scratch + 2 * SHAPE.PLACES + lanes)
        decay, share = _gates_of(words, buffers, sequence, head, SHAPE)
        state *= decay
        k = tl.load(scratch + SHAPE.PLACES + keys)
        delta = (v - tl.sum(state * k[:, None], 0)) * share
        state += k[:, None] * delta[None, :]
        tl.debug_barrier()  # after all threads have loaded: the new state may replace the old one
        tl.store(_state_at(states + new * stride, head, SHAPE) + places, state, mask=whole)
        q = tl.load(scratch + keys)
        mixed = as_rounded(tl.sum(state * q[:, None], 0), SHAPE.DTYPE)
        inverse = 1.0 / tl.sqrt(tl.sum(mixed * mixed, 0) / SHAPE.VALUE + SHAPE.EPS)
        scale = tl.load(norm + lanes, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
        normed = scaled(mixed, inverse, scale, False, SHAPE.DTYPE)
        normed *= activated(z, abi.ACTIVATION_SILU)
        tl.store(out + column, rounded(normed, SHAPE.DTYPE), mask=inside)


@triton.jit
def _states_of(words, buffers, sequence):
    """Return the numbers of the states that the sequence resumes from, and that it writes.

    After the first step of a launch, it resumes from the one that it writes.
    """
    write = start_of(buffers, tl.load(words + abi.DELTA_STEP_WRITE), tl.int32)
    read = start_of(buffers, tl.load(words + abi.DELTA_STEP_READ), tl.int32)
    clock = start_of(buffers, tl.load(words + abi.DELTA_STEP_CLOCK), tl.int32)
    new = tl.load(write + sequence)
    return tl.where(tl.load(clock) > 0, new, tl.load(read + sequence)), new


@triton.jit
def _state_at(states, head, SHAPE):
    """Return the address of a head's state, among those of a layer and a sequence."""
    address = states + head * (SHAPE.KEY * SHAPE.VALUE)
    if SHAPE.VALUE % 4 == 0:  # then so are all strides, which lets a load have 16 bytes
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _convolved(words, buffers, inputs, old, new, resumes, channels, inside, SHAPE):
    """Convolve some channels, and store their new tail, which may replace the old one."""
    number = tl.load(words + abi.DELTA_STEP_TAILS)
    tails = start_of(buffers, number, SHAPE.DTYPE)
    tails += tl.load(words + abi.DELTA_STEP_LAYER) * stride_of(buffers, number, 0)
    stride = stride_of(buffers, number, 1)
    row = stride_of(buffers, number, 2)
    taps = ()
    for tap in tl.static_range(SHAPE.TAPS - 1):
        addresses = tails + old * stride + tap * row + channels
        taps = taps + (tl.load(addresses, mask=inside & resumes, other=0.0),)
    taps = taps + (tl.load(inputs + channels, mask=inside, other=0.0),)
    tl.debug_barrier()  # several threads may have loaded the same channel
    weight = start_of(buffers, tl.load(words + abi.DELTA_STEP_WEIGHT), SHAPE.DTYPE)
    weight += channels * SHAPE.TAPS
    sums = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(SHAPE.TAPS):
        scale = tl.load(weight + tap, mask=inside, other=0.0).to(tl.float32)
        sums += taps[tap].to(tl.float32) * scale
        if tap > 0:
            tl.store(tails + new * stride + (tap - 1) * row + channels, taps[tap], mask=inside)
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.DELTA_STEP_BIAS), SHAPE.DTYPE)
        sums += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    return as_rounded(activated(sums, abi.ACTIVATION_SILU), SHAPE.DTYPE)


@triton.jit
def _normalized(head):
    """Divide a head by its length."""
    return head / tl.sqrt(tl.sum(head * head, 0) + _EPSILON)


@triton.jit
def _gates_of(words, buffers, sequence, head, SHAPE):
    """Return the factor by which a head's state decays, and the share of the token's update."""
    number = tl.load(words + abi.DELTA_STEP_GATES)
    gates = start_of(buffers, number, SHAPE.DTYPE) + sequence * stride_of(buffers, number, 0) + head
    offset = start_of(buffers, tl.load(words + abi.DELTA_STEP_OFFSET), SHAPE.DTYPE) + head
    rate = start_of(buffers, tl.load(words + abi.DELTA_STEP_RATE), SHAPE.DTYPE) + head
    changed = tl.load(gates + tl.load(words + abi.DELTA_STEP_V_HEADS)).to(tl.float32)
    changed = _softplus(changed + tl.load(offset).to(tl.float32))
    decay = tl.exp(-tl.exp(tl.load(rate).to(tl.float32)) * changed)
    return decay, sigmoid(tl.load(gates).to(tl.float32))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)); as exact for values far below 0, where the sum rounds to 1."""
    power = tl.exp(tl.minimum(x, _LINEAR))
    more = 1.0 + power
    rounding = power / tl.where(more == 1.0, 1.0, more - 1.0)
    logarithm = tl.where(more == 1.0, power, tl.log(more) * rounding)
    return tl.where(x > _LINEAR, x, logarithm)
