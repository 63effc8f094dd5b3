"""The logits, and the next tokens."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .rows import store_rows
from .weights import rows_of

_VALUES = tl.constexpr(4096)
"""The logits that are compared at a time."""
_NOWHERE = tl.constexpr(2**31 - 1)
"""A place after all others."""


@triton.jit
def norm_lm_head(words, buffers, scratch, SHAPE):
    """Compute the logits of some rows, and the best of them: the first one if several are equal."""
    x = start_of(buffers, tl.load(words + abi.NORM_LM_HEAD_NORMED_X), SHAPE.DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_LM_HEAD_NORMED_WEIGHT), SHAPE.DTYPE)
    bias = norm
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_LM_HEAD_BIAS), SHAPE.DTYPE)
    number = tl.load(words + abi.NORM_LM_HEAD_LOGITS)
    logits = start_of(buffers, number, SHAPE.DTYPE)
    stride = stride_of(buffers, number, 0)
    number = tl.load(words + abi.NORM_LM_HEAD_BEST)
    slot = tl.load(words + abi.NORM_LM_HEAD_SLOT)
    best = start_of(buffers, number, tl.float32) + slot
    ids = start_of(buffers, tl.load(words + abi.NORM_LM_HEAD_IDS), tl.int32) + slot
    slots = stride_of(buffers, number, 0)
    first = tl.load(words + abi.NORM_LM_HEAD_ROWS)
    last = tl.load(words + abi.NORM_LM_HEAD_ROWS + 1)
    rows = last - first
    number = tl.load(words + abi.NORM_LM_HEAD_WEIGHT)
    weight = rows_of(buffers, number, first, 0, SHAPE)
    logits += first
    bias += first
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        store_rows(x, norm, weight, bias, logits, stride, rows, begin, SHAPE)
        tl.debug_barrier()
        sequences = begin + tl.arange(0, SHAPE.SEQUENCES)
        top, token = _best(logits, stride, rows, sequences, SHAPE)
        token += first + tl.load(words + abi.NORM_LM_HEAD_FIRST)
        tl.store(best + sequences * slots, top, mask=sequences < SHAPE.BATCH)
        tl.store(ids + sequences * slots, token, mask=sequences < SHAPE.BATCH)


@triton.jit
def _best(logits, stride, rows, sequences, SHAPE):
    """Return the highest logit of each sequence, and its row: of equal logits, the first."""
    columns: tl.constexpr = _VALUES // SHAPE.SEQUENCES
    top = tl.full([SHAPE.SEQUENCES], float("-inf"), tl.float32)
    token = tl.full([SHAPE.SEQUENCES], _NOWHERE, tl.int32)
    for begin in range(0, rows, columns):
        places = begin + tl.arange(0, columns)[None, :]
        inside = (places < rows) & (sequences < SHAPE.BATCH)[:, None]
        addresses = logits + sequences[:, None] * stride + places
        values = tl.load(addresses, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.max(values, 1)
        equal = inside & (values == highest[:, None])
        better = (highest > top) | (token == _NOWHERE)
        token = tl.where(better, tl.min(tl.where(equal, places, _NOWHERE), 1), token)
        top = tl.where(better, highest, top)
    return top, token


@triton.jit
def argmax(words, buffers, scratch, SHAPE):
    """Choose the next token of each sequence, which is the next input unless the sequence ended."""
    best = tl.load(words + abi.ARGMAX_BEST)
    ids = tl.load(words + abi.ARGMAX_IDS)
    tokens = start_of(buffers, tl.load(words + abi.ARGMAX_TOKENS), tl.int32)
    positions = start_of(buffers, tl.load(words + abi.ARGMAX_POSITIONS), tl.int32)
    lengths = start_of(buffers, tl.load(words + abi.ARGMAX_LENGTHS), tl.int32)
    finished = start_of(buffers, tl.load(words + abi.ARGMAX_FINISHED), tl.int32)
    stops = start_of(buffers, tl.load(words + abi.ARGMAX_STOPS), tl.int32)
    clock = start_of(buffers, tl.load(words + abi.ARGMAX_CLOCK), tl.int32)
    history = start_of(buffers, tl.load(words + abi.ARGMAX_HISTORY), tl.int32)
    step = tl.load(clock)
    places = tl.arange(0, SHAPE.PLACES)
    ends = tl.arange(0, SHAPE.STOPS)
    for sequence in range(SHAPE.BATCH):
        top = float("-inf")
        token = _NOWHERE
        for rank in range(SHAPE.RANKS):
            offsets = sequence * SHAPE.SLOTS + places
            own_best = start_of(buffers, best + rank, tl.float32)
            own_ids = start_of(buffers, ids + rank, tl.int32)
            values = tl.load(own_best + offsets, mask=places < SHAPE.SLOTS, other=float("-inf"))
            highest = tl.max(values, 0)
            slot = tl.min(tl.where(values == highest, places, SHAPE.PLACES - 1), 0)
            candidate = tl.load(own_ids + sequence * SHAPE.SLOTS + slot)
            better = (highest > top) | (token == _NOWHERE)
            token = tl.where(better, candidate, token)
            top = tl.where(better, highest, top)
        length = tl.load(lengths + sequence)
        ended = (tl.load(finished + sequence) != 0) | (length == 0)
        stop = tl.load(stops + ends, mask=ends < SHAPE.MOST_STOPS, other=abi.NONE)
        stopped = tl.max((stop == token).to(tl.int32), 0) != 0
        tl.store(history + step * SHAPE.BATCH + sequence, tl.where(ended, abi.NONE, token))
        tl.store(finished + sequence, 1, mask=stopped & (ended == 0))
        goes_on = (ended == 0) & (stopped == 0)
        tl.store(tokens + sequence, token, mask=goes_on)
        position = tl.load(positions + sequence)
        tl.store(positions + sequence, position + 1, mask=goes_on)
        tl.store(lengths + sequence, length + 1, mask=goes_on)
    tl.debug_barrier()
    tl.store(clock, step + 1)


@triton.jit
def all_ended(words, buffers, BATCH: tl.constexpr):
    """Return whether every sequence has ended or is empty, after `argmax` on this worker."""
    finished = start_of(buffers, tl.load(words + abi.ARGMAX_FINISHED), tl.int32)
    lengths = start_of(buffers, tl.load(words + abi.ARGMAX_LENGTHS), tl.int32)
    active = 0
    for sequence in range(BATCH):
        ended = (tl.load(finished + sequence) != 0) | (tl.load(lengths + sequence) == 0)
        active += (ended == 0).to(tl.int32)
    return active == 0
