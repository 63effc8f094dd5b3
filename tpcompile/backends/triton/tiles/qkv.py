"""Projection, norm and rotation of queries, keys and values.

Both instructions have the same shared operands at the same words.
"""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import GROUP
from .numbers import as_rounded, rounded, scaled
from .rows import store_rows
from .weights import rows_of


@triton.jit
def norm_qkv_rope_append(words, buffers, scratch, SHAPE):
    """Compute whole heads. Their rows meet in the worker's scratch memory."""
    raw = scratch.to(tl.pointer_type(SHAPE.DTYPE))
    first = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS)
    last = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS + 1)
    for head in range(first, last):
        _project(words, buffers, raw, SHAPE.HEAD, head * SHAPE.HEAD, SHAPE.HEAD, SHAPE)
        tl.debug_barrier()
        _finish(words, buffers, raw, SHAPE.HEAD, head, SHAPE)
        tl.debug_barrier()


@triton.jit
def norm_qkv_rows(words, buffers, scratch, SHAPE):
    """Compute some rows of a head. The last block of the head to arrive finishes it."""
    head = tl.load(words + abi.NORM_QKV_ROWS_HEAD)
    first = tl.load(words + abi.NORM_QKV_ROWS_ROWS)
    last = tl.load(words + abi.NORM_QKV_ROWS_ROWS + 1)
    place = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) // SHAPE.HEAD + head
    number = tl.load(words + abi.NORM_QKV_ROWS_RAW)
    raw = start_of(buffers, number, SHAPE.DTYPE) + place * SHAPE.HEAD
    stride = stride_of(buffers, number, 0)
    _project(words, buffers, raw + first, stride, head * SHAPE.HEAD + first, last - first, SHAPE)
    tl.debug_barrier()
    arrivals = start_of(buffers, tl.load(words + abi.NORM_QKV_ROWS_ARRIVALS), tl.int32)
    arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu") + 1
    if arrived % tl.load(words + abi.NORM_QKV_ROWS_BLOCKS) == 0:
        tl.debug_barrier()
        _finish(words, buffers, raw, stride, head, SHAPE)


@triton.jit
def _project(words, buffers, out, stride, first, rows, SHAPE):
    """Store rows of the part, beginning with `first`, of all sequences at `out[BATCH, stride]`."""
    x = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_X), SHAPE.DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_WEIGHT), SHAPE.DTYPE)
    begin = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) + first
    bias = norm
    if SHAPE.BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_BIAS), SHAPE.DTYPE)
        bias += begin
    number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_WEIGHT)
    weight = rows_of(buffers, number, begin, 0, SHAPE)
    for begin in range(0, SHAPE.BATCH, SHAPE.SEQUENCES):
        store_rows(x, norm, weight, bias, out, stride, rows, begin, SHAPE)


@triton.jit
def _finish(words, buffers, raw, stride, head, SHAPE):
    """Norm, rotate and store a whole head of all sequences."""
    lanes = tl.arange(0, SHAPE.LANES)[None, :]
    half: tl.constexpr = SHAPE.ROTATED // 2
    if SHAPE.INTERLEAVED:
        partner = lanes ^ 1
        leads = lanes % 2 == 0
        column = lanes // 2 + (lanes % 2) * half
    else:
        leads = lanes < half
        partner = tl.where(leads, lanes + half, lanes - half)
        column = lanes
    for begin in range(0, SHAPE.BATCH, GROUP):
        sequences = begin + tl.arange(0, GROUP)[:, None]
        here = sequences < SHAPE.BATCH
        inside = here & (lanes < SHAPE.HEAD)
        rows = raw + sequences * stride
        values = tl.load(rows + lanes, mask=inside, other=0.0).to(tl.float32)
        partner_values = tl.load(rows + partner, mask=inside, other=0.0).to(tl.float32)
        if SHAPE.HEAD_NORM:
            squares = tl.sum(values * values, 1) / SHAPE.HEAD
            inverse = 1.0 / tl.sqrt(squares + SHAPE.HEAD_EPS)[:, None]
            number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEAD_NORM)
            norm = start_of(buffers, number, SHAPE.DTYPE)
            scale = tl.load(norm + lanes, mask=lanes < SHAPE.HEAD, other=0.0).to(tl.float32)
            values = scaled(values, inverse, scale, SHAPE.ZERO_CENTERED, SHAPE.DTYPE)
            scale = tl.load(norm + partner, mask=lanes < SHAPE.HEAD, other=0.0).to(tl.float32)
            partner_values = scaled(
                partner_values, inverse, scale, SHAPE.ZERO_CENTERED, SHAPE.DTYPE
            )
        if SHAPE.PART != abi.PART_V:
            number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_POSITIONS)
            positions = start_of(buffers, number, tl.int32)
            row = tl.load(positions + sequences, mask=here, other=0).to(tl.int64) * SHAPE.ROTATED
            table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_COS), SHAPE.DTYPE)
            turning = inside & (lanes < SHAPE.ROTATED)
            cos = tl.load(table + row + column, mask=turning, other=0.0).to(tl.float32)
            table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_SIN), SHAPE.DTYPE)
            sin = tl.load(table + row + column, mask=turning, other=0.0).to(tl.float32)
            turned = tl.where(leads, -partner_values, partner_values)
            turned = as_rounded(values * cos, SHAPE.DTYPE) + as_rounded(turned * sin, SHAPE.DTYPE)
            values = tl.where(lanes < SHAPE.ROTATED, turned, values)
        number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_OUT)
        out = start_of(buffers, number, SHAPE.DTYPE)
        if SHAPE.PART == abi.PART_Q:
            out += sequences * stride_of(buffers, number, 0) + head * SHAPE.HEAD
            tl.store(out + lanes, rounded(values, SHAPE.DTYPE), mask=inside)
        else:
            lengths = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_LENGTHS), tl.int32)
            place = tl.load(lengths + sequences, mask=here, other=0) - 1
            tables = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_TABLES), tl.int32)
            addresses = tables + sequences * SHAPE.MOST_BLOCKS + place // SHAPE.BLOCK
            block = tl.load(addresses, mask=place >= 0, other=0)
            slot = block.to(tl.int64) * SHAPE.BLOCK + place % SHAPE.BLOCK
            layer = tl.load(words + abi.NORM_QKV_ROPE_APPEND_LAYER)
            start = layer * stride_of(buffers, number, 0)
            out += start + SHAPE.PART * stride_of(buffers, number, 1)
            out += head * stride_of(buffers, number, 3)
            addresses = out + slot * stride_of(buffers, number, 2) + lanes
            tl.store(addresses, rounded(values, SHAPE.DTYPE), mask=inside & (place >= 0))
