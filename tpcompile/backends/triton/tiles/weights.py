"""Rows of a weight in its format, of which tiles are loaded and widened in registers.

A format of few bits has integers or e4m3 values. These, and the differences of integers and their
offsets, are exact in 16 bits, so matrix instructions multiply them like weights of the model's
dtype. What they return for 16 columns, which are in one group, is scaled in fp32.
"""

import triton
import triton.language as tl

from tpcompile.backends.triton import options
from tpcompile.ir.format import Format

from . import abi
from .access import address_of, start_of

STEP = tl.constexpr(options.STEP)
"""The columns that are multiplied at a time."""
SLICES = tl.constexpr(options.WARPS)
"""The slices of a tile: one per warp."""
_NIBBLES = tl.constexpr(8)
"""The integers of 4 bits per word."""


@triton.constexpr_function
def _is_plain(number):
    return Format(number).plain


@triton.constexpr_function
def _kind(number):
    return Format(number).kind


@triton.constexpr_function
def _scales_of(number):
    return Format(number).scales


@triton.constexpr_function
def _has_offsets(number):
    return Format(number).offsets


@triton.constexpr_function
def _group(number):
    """Return the columns per group; 0 if a whole row is one."""
    return Format(number).columns


@triton.jit
def rows_of(
    buffers,
    number,
    row,
    column,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return what tiles of a weight need that begin with a row and a column.

    This is the address of its values; of formats with scales also the scales per row, the distance
    of the column from the start of a group, and the addresses of scales and offsets as numbers.
    """
    row = tl.cast(row, tl.int64)
    if _is_plain(FORMAT):
        found = (start_of(buffers, number, DTYPE) + row * WIDTH + column,)
    else:
        if _kind(FORMAT) == abi.KIND_INT4:
            values = start_of(buffers, number, tl.int32) + row * tl.cdiv(WIDTH, _NIBBLES)
            values += column // _NIBBLES
        elif _kind(FORMAT) == abi.KIND_INT8:
            values = start_of(buffers, number, tl.int8) + row * WIDTH + column
        else:
            tl.static_assert(_kind(FORMAT) == abi.KIND_FP8)
            values = start_of(buffers, number, tl.uint8) + row * WIDTH + column
        groups, before = 1, 0
        if _group(FORMAT):
            before = tl.load(buffers + number * abi.BUFFER_COLUMNS + abi.BUFFER_FIRST)
            before = (before % _group(FORMAT)).to(tl.int32)
            groups = (before + WIDTH + _group(FORMAT) - 1) // _group(FORMAT)
        size: tl.constexpr = 4 if _scales_of(FORMAT) == abi.SCALES_F32 else 2
        scales = address_of(buffers, number, abi.BUFFER_SCALES) + row * groups * size
        offsets = address_of(buffers, number, abi.BUFFER_OFFSETS) + row * groups
        found = (values, groups, before + column, scales, offsets)
    return found


@triton.jit
def weights_of(
    weight,
    row,
    first,
    rows,
    width,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Load a tile of `weight[rows, width]`, `[slices, ROWS, columns of a slice]`, and its scales.

    A tile with scales has a slice for each run of 16 columns.
    """
    if _is_plain(FORMAT):
        own = tl.arange(0, ROWS)[None, :, None]
        columns = first + columns_of(COLUMNS, SLICES)[:, None, :]
        at = weight[0] + (tl.cast(row, tl.int64) + own) * STRIDE + columns
        tile = (tl.load(at, mask=(own < rows - row) & (columns < width), other=0.0),)
    else:
        values, groups, before, scales, offsets = weight
        # With one dimension for runs and rows, Triton copies values to shared memory in the order
        # of addresses.
        place = tl.arange(0, COLUMNS // STEP * ROWS)
        own = place % ROWS
        run = place // ROWS
        inside = (own < rows - row) & (first + STEP * run < width)
        own += tl.cast(row, tl.int64)
        numbers = _numbers(values, own, first, run, inside, width, STRIDE, FORMAT)
        group = own * groups
        if _group(FORMAT):
            group += (before + first + STEP * run) // _group(FORMAT)
        if _has_offsets(FORMAT):
            numbers -= (_word_at(offsets + group, inside) << 24 >> 24)[:, None]
        scale = _scale_at(scales, group, inside, FORMAT)
        # The interpreter converts only fp32 to bf16.
        numbers = numbers.to(tl.float32).to(DTYPE).reshape(COLUMNS // STEP, ROWS, STEP)
        tile = (numbers, scale.reshape(COLUMNS // STEP, ROWS, 1))
    return tile


@triton.jit
def _numbers(values, row, first, run, inside, width, STRIDE: tl.constexpr, FORMAT: tl.constexpr):
    """Load the numbers of runs of 16 columns, before offsets are subtracted: `[runs, 16]`."""
    packed: tl.constexpr = _NIBBLES if _kind(FORMAT) == abi.KIND_INT4 else 1
    each: tl.constexpr = STEP // packed
    values += first // packed
    places = each * run[:, None] + tl.arange(0, each)[None, :]
    inside = inside[:, None] & (first + packed * places < width)
    found = tl.load(values + row[:, None] * tl.cdiv(STRIDE, packed) + places, mask=inside, other=0)
    if _kind(FORMAT) == abi.KIND_INT4:
        shifts = 4 * tl.arange(0, _NIBBLES)[None, None, :]
        numbers = ((found[:, :, None] >> shifts & 15) - 8).reshape(found.shape[0], STEP)
    elif _kind(FORMAT) == abi.KIND_INT8:
        numbers = found.to(tl.int32)
    else:
        # As bits of fp16, an octet of e4m3 is a number 256 times smaller.
        bits = found.to(tl.uint16)
        bits = (bits & 0x80) << 8 | (bits & 0x7F) << 7
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


@triton.jit
def _scale_at(address, group, inside, FORMAT: tl.constexpr):
    """Load the scales of groups in fp32."""
    if _scales_of(FORMAT) == abi.SCALES_F32:
        at = (address + 4 * group).to(tl.pointer_type(tl.float32))
        found = tl.load(at, mask=inside, other=0.0)
    elif _scales_of(FORMAT) == abi.SCALES_BF16:
        found = (_word_at(address + 2 * group, inside) << 16).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(_scales_of(FORMAT) == abi.SCALES_F16)
        bits = _word_at(address + 2 * group, inside).to(tl.int16)
        found = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _word_at(address, inside):
    """Load the words that hold numbers of up to 4 bytes, shifted until these are lowest.

    Only loads of 4 bytes or more are asynchronous. A word in which a byte can be read can be read.
    """
    words = (address & -4).to(tl.pointer_type(tl.int32))
    return tl.load(words, mask=inside, other=0) >> (8 * (address & 3)).to(tl.int32)


@triton.jit
def columns_of(COLUMNS: tl.constexpr, SLICES: tl.constexpr):
    """Return the columns of a tile by slice. Each has 16 columns in turn."""
    own = tl.arange(0, COLUMNS // SLICES)[None, :]
    slices = tl.arange(0, SLICES)[:, None]
    return own // STEP * (SLICES * STEP) + slices * STEP + own % STEP
