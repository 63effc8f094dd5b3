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
def norm_qkv_rope_append(
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
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    ROTATED: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute whole heads. Their rows meet in the worker's scratch memory."""
    raw = own.to(tl.pointer_type(DTYPE))
    first = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS)
    last = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS + 1)
    for head in range(first, last):
        _project(
            words, buffers, raw, HEAD, head * HEAD, HEAD,
            BATCH, SEQUENCES, TILES, ROWS, COLUMNS, STAGES, WIDTH, EPS,
            ZERO_CENTERED, BIAS, DTYPE, FORMAT,
        )  # fmt: skip
        tl.debug_barrier()
        _finish(
            words, buffers, raw, HEAD, head, BATCH,
            HEAD, LANES, ROTATED, PART, HEAD_NORM, HEAD_EPS, ZERO_CENTERED, INTERLEAVED,
            MOST_BLOCKS, BLOCK, DTYPE,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def norm_qkv_rows(
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
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    ROTATED: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute some rows of a head. The last block of the head to arrive finishes it."""
    head = tl.load(words + abi.NORM_QKV_ROWS_HEAD)
    first = tl.load(words + abi.NORM_QKV_ROWS_ROWS)
    last = tl.load(words + abi.NORM_QKV_ROWS_ROWS + 1)
    place = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) // HEAD + head
    number = tl.load(words + abi.NORM_QKV_ROWS_RAW)
    raw = start_of(buffers, number, DTYPE) + place * HEAD
    stride = stride_of(buffers, number, 0)
    _project(
        words, buffers, raw + first, stride, head * HEAD + first, last - first,
        BATCH, SEQUENCES, TILES, ROWS, COLUMNS, STAGES, WIDTH, EPS,
        ZERO_CENTERED, BIAS, DTYPE, FORMAT,
    )  # fmt: skip
    tl.debug_barrier()
    arrivals = start_of(buffers, tl.load(words + abi.NORM_QKV_ROWS_ARRIVALS), tl.int32)
    arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu") + 1
    if arrived % tl.load(words + abi.NORM_QKV_ROWS_BLOCKS) == 0:
        tl.debug_barrier()
        _finish(
            words, buffers, raw, stride, head, BATCH,
            HEAD, LANES, ROTATED, PART, HEAD_NORM, HEAD_EPS, ZERO_CENTERED, INTERLEAVED,
            MOST_BLOCKS, BLOCK, DTYPE,
        )  # fmt: skip


@triton.jit
def _project(
    words,
    buffers,
    out,
    stride,
    first,
    rows,
    BATCH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store rows of the part, beginning with `first`, of all sequences at `out[BATCH, stride]`."""
    x = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_X), DTYPE)
    norm = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_WEIGHT), DTYPE)
    begin = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) + first
    bias = norm
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_BIAS), DTYPE) + begin
    number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_WEIGHT)
    weight = rows_of(buffers, number, begin, 0, WIDTH, DTYPE, FORMAT)
    for begin in range(0, BATCH, SEQUENCES):
        store_rows(
            x, norm, weight, bias, out, stride, rows, begin, BATCH, SEQUENCES, TILES,
            ROWS, COLUMNS, STAGES, WIDTH, EPS, ZERO_CENTERED, BIAS, DTYPE, FORMAT,
        )  # fmt: skip


@triton.jit
def _finish(
    words,
    buffers,
    raw,
    stride,
    head,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    ROTATED: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norm, rotate and store a whole head of all sequences."""
    lanes = tl.arange(0, LANES)[None, :]
    half: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        partner = lanes ^ 1
        leads = lanes % 2 == 0
        column = lanes // 2 + (lanes % 2) * half
    else:
        leads = lanes < half
        partner = tl.where(leads, lanes + half, lanes - half)
        column = lanes
    for begin in range(0, BATCH, GROUP):
        sequences = begin + tl.arange(0, GROUP)[:, None]
        here = sequences < BATCH
        inside = here & (lanes < HEAD)
        rows = raw + sequences * stride
        values = tl.load(rows + lanes, mask=inside, other=0.0).to(tl.float32)
        others = tl.load(rows + partner, mask=inside, other=0.0).to(tl.float32)
        if HEAD_NORM:
            inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / HEAD + HEAD_EPS)[:, None]
            norm = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEAD_NORM), DTYPE)
            scale = tl.load(norm + lanes, mask=lanes < HEAD, other=0.0).to(tl.float32)
            values = scaled(values, inverse, scale, ZERO_CENTERED, DTYPE)
            scale = tl.load(norm + partner, mask=lanes < HEAD, other=0.0).to(tl.float32)
            others = scaled(others, inverse, scale, ZERO_CENTERED, DTYPE)
        if PART != abi.PART_V:
            number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_POSITIONS)
            positions = start_of(buffers, number, tl.int32)
            row = tl.load(positions + sequences, mask=here, other=0).to(tl.int64) * ROTATED
            table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_COS), DTYPE)
            turning = inside & (lanes < ROTATED)
            cos = tl.load(table + row + column, mask=turning, other=0.0).to(tl.float32)
            table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_SIN), DTYPE)
            sin = tl.load(table + row + column, mask=turning, other=0.0).to(tl.float32)
            turned = tl.where(leads, -others, others)
            turned = as_rounded(values * cos, DTYPE) + as_rounded(turned * sin, DTYPE)
            values = tl.where(lanes < ROTATED, turned, values)
        number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_OUT)
        out = start_of(buffers, number, DTYPE)
        if PART == abi.PART_Q:
            out += sequences * stride_of(buffers, number, 0) + head * HEAD
            tl.store(out + lanes, rounded(values, DTYPE), mask=inside)
        else:
            lengths = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_LENGTHS), tl.int32)
            place = tl.load(lengths + sequences, mask=here, other=0) - 1
            tables = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_TABLES), tl.int32)
            at = tables + sequences * MOST_BLOCKS + place // BLOCK
            block = tl.load(at, mask=place >= 0, other=0)
            slot = block.to(tl.int64) * BLOCK + place % BLOCK
            layer = tl.load(words + abi.NORM_QKV_ROPE_APPEND_LAYER)
            out += layer * stride_of(buffers, number, 0) + PART * stride_of(buffers, number, 1)
            out += head * stride_of(buffers, number, 3)
            at = out + slot * stride_of(buffers, number, 2) + lanes
            tl.store(at, rounded(values, DTYPE), mask=inside & (place >= 0))
