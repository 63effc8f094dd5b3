"""Projection, norm and rotation of queries, keys and values.

Both instructions have the same shared operands at the same words.
"""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .dots import ROWS, STAGES, add_tile, first_row, inverse_rms, is_last, tiles_of, with_bias
from .numbers import as_rounded, rounded, scaled


@triton.jit
def norm_qkv_rope_append(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute whole heads. Their rows meet in the worker's scratch memory."""
    raw = own.to(tl.pointer_type(DTYPE))
    first = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS)
    last = tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEADS + 1)
    for sequence in range(BATCH):
        for head in range(first, last):
            _project(
                words, buffers, raw, sequence, head * HEAD, HEAD,
                WIDTH, EPS, COLUMNS, BIAS, DTYPE,
            )  # fmt: skip
            tl.debug_barrier()
            _finish(
                words, buffers, raw, sequence, head,
                HEAD, LANES, PART, HEAD_NORM, HEAD_EPS, INTERLEAVED, MOST_BLOCKS, BLOCK, DTYPE,
            )  # fmt: skip
            tl.debug_barrier()


@triton.jit
def norm_qkv_rows(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute some rows of a head. The last block of the head to arrive finishes it."""
    head = tl.load(words + abi.NORM_QKV_ROWS_HEAD)
    first = tl.load(words + abi.NORM_QKV_ROWS_ROWS)
    last = tl.load(words + abi.NORM_QKV_ROWS_ROWS + 1)
    place = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) // HEAD + head
    number = tl.load(words + abi.NORM_QKV_ROWS_RAW)
    raw = start_of(buffers, number, DTYPE) + place * HEAD
    stride = stride_of(buffers, number, 0)
    for sequence in range(BATCH):
        _project(
            words, buffers, raw + sequence * stride + first, sequence, head * HEAD + first,
            last - first, WIDTH, EPS, COLUMNS, BIAS, DTYPE,
        )  # fmt: skip
    tl.debug_barrier()
    arrivals = start_of(buffers, tl.load(words + abi.NORM_QKV_ROWS_ARRIVALS), tl.int32)
    arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu") + 1
    if arrived % tl.load(words + abi.NORM_QKV_ROWS_BLOCKS) == 0:
        tl.debug_barrier()
        for sequence in range(BATCH):
            _finish(
                words, buffers, raw + sequence * stride, sequence, head,
                HEAD, LANES, PART, HEAD_NORM, HEAD_EPS, INTERLEAVED, MOST_BLOCKS, BLOCK, DTYPE,
            )  # fmt: skip


@triton.jit
def _project(
    words,
    buffers,
    out,
    sequence,
    first,
    rows,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Store rows of the part, beginning with `first`, at `out`."""
    x = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_X), DTYPE)
    x += sequence * WIDTH
    norm = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_NORMED_WEIGHT), DTYPE)
    weight = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_WEIGHT), DTYPE)
    begin = tl.load(words + abi.NORM_QKV_ROPE_APPEND_FIRST_ROW) + first
    bias = weight
    if BIAS:
        bias = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_BIAS), DTYPE) + begin
    weight += begin.to(tl.int64) * WIDTH
    inverse = inverse_rms(x, WIDTH, EPS, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(0, tiles_of(rows, WIDTH, COLUMNS), num_stages=STAGES):
        sums = add_tile(
            sums, tile, x, norm, inverse, weight, rows, WIDTH, WIDTH, True, DTYPE, COLUMNS
        )
        if is_last(tile, WIDTH, COLUMNS):
            places = first_row(tile, WIDTH, COLUMNS) + tl.arange(0, ROWS)
            inside = places < rows
            found = with_bias(tl.sum(sums, 1), bias + places, inside, BIAS)
            tl.store(out + places, rounded(found, DTYPE), mask=inside)


@triton.jit
def _finish(
    words,
    buffers,
    raw,
    sequence,
    head,
    HEAD: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    HEAD_EPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norm, rotate and store a whole head of a sequence."""
    lanes = tl.arange(0, LANES)
    inside = lanes < HEAD
    half: tl.constexpr = HEAD // 2
    if INTERLEAVED:
        partner = lanes ^ 1
        leads = lanes % 2 == 0
        column = lanes // 2 + (lanes % 2) * half
    else:
        leads = lanes < half
        partner = tl.where(leads, lanes + half, lanes - half)
        column = lanes
    values = tl.load(raw + lanes, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(raw + partner, mask=inside, other=0.0).to(tl.float32)
    if HEAD_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / HEAD + HEAD_EPS)
        norm = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_HEAD_NORM), DTYPE)
        scale = tl.load(norm + lanes, mask=inside, other=0.0).to(tl.float32)
        values = scaled(values, inverse, scale, DTYPE)
        scale = tl.load(norm + partner, mask=inside, other=0.0).to(tl.float32)
        others = scaled(others, inverse, scale, DTYPE)
    if PART != abi.PART_V:
        positions = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_POSITIONS), tl.int32)
        row = tl.load(positions + sequence).to(tl.int64) * HEAD
        table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_COS), DTYPE)
        cos = tl.load(table + row + column, mask=inside, other=0.0).to(tl.float32)
        table = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_SIN), DTYPE)
        sin = tl.load(table + row + column, mask=inside, other=0.0).to(tl.float32)
        turned = tl.where(leads, -others, others)
        values = as_rounded(values * cos, DTYPE) + as_rounded(turned * sin, DTYPE)
    number = tl.load(words + abi.NORM_QKV_ROPE_APPEND_OUT)
    out = start_of(buffers, number, DTYPE)
    if PART == abi.PART_Q:
        out += sequence * stride_of(buffers, number, 0) + head * HEAD
        tl.store(out + lanes, rounded(values, DTYPE), mask=inside)
    else:
        lengths = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_LENGTHS), tl.int32)
        place = tl.load(lengths + sequence) - 1
        tables = start_of(buffers, tl.load(words + abi.NORM_QKV_ROPE_APPEND_TABLES), tl.int32)
        table = tables + sequence * MOST_BLOCKS
        block = tl.load(table + place // BLOCK, mask=place >= 0, other=0)
        slot = block.to(tl.int64) * BLOCK + place % BLOCK
        layer = tl.load(words + abi.NORM_QKV_ROPE_APPEND_LAYER)
        out += layer * stride_of(buffers, number, 0) + PART * stride_of(buffers, number, 1)
        out += slot * stride_of(buffers, number, 2) + head * stride_of(buffers, number, 3)
        tl.store(out + lanes, rounded(values, DTYPE), mask=lanes < tl.where(place >= 0, HEAD, 0))
