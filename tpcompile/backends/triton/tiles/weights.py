"""Rows of a weight in its format, of which tiles are loaded and widened in registers.

A format of few bits has integers or e4m3 values. These, and the differences of integers and their
offsets, are exact in 16 bits, so matrix instructions multiply them like weights of the model's
dtype. What they return for 16 columns, which are in one group, is scaled in fp32.

Numbers are widened in the registers of the threads that multiply them. Triton would move them
through shared memory if an operation on them depended on their place, such as a shift by
`tl.arange`.
"""

import triton
import triton.language as tl

from tpcompile.backends.triton import options
from tpcompile.ir.format import Format, Kind

from . import abi
from .access import address_of, start_of
from .numbers import INTERPRETED

STEP = tl.constexpr(options.STEP)
"""The columns that are multiplied at a time."""
SLICES = tl.constexpr(options.WARPS)
"""The parts of a row of weights, each of consecutive columns, whose sums are added in order."""
_NIBBLES = tl.constexpr(4)
"""The integers of 4 bits per load. A matrix instruction takes 4 columns of each row per thread."""
_PADDED = tl.constexpr(8)
"""Rows of 4-bit integers are padded to a multiple of this."""
_ABOVE_BF16, _ABOVE_FP16 = tl.constexpr(0x4300), tl.constexpr(0x6400)
"""128 as bits of bf16, and 1,024 as bits of fp16: the offset of integers in the lowest bits."""
_TIMES_BF16, _TIMES_FP16 = tl.constexpr(2.0**120), tl.constexpr(2.0**8)
"""As bits of bf16 or fp16, an e4m3 value is smaller by this factor."""


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
def rows_of(buffers, number, row, column, SHAPE):
    """Return what tiles of a weight need that begin with a row and a column.

    This is the address of its values; of formats with scales also the scales per row, the distance
    of the column from the start of a group, and the addresses of scales and offsets as numbers.
    """
    row = tl.cast(row, tl.int64)
    if _is_plain(SHAPE.FORMAT):
        weight = (start_of(buffers, number, SHAPE.DTYPE) + row * SHAPE.WIDTH + column,)
    else:
        if _kind(SHAPE.FORMAT) == abi.KIND_INT4:
            values = start_of(buffers, number, tl.int16) + row * _stride(SHAPE.WIDTH, SHAPE.FORMAT)
            values += column // _NIBBLES
        elif _kind(SHAPE.FORMAT) == abi.KIND_INT8:
            values = start_of(buffers, number, tl.int8) + row * SHAPE.WIDTH + column
        else:
            tl.static_assert(_kind(SHAPE.FORMAT) == abi.KIND_FP8)
            values = start_of(buffers, number, tl.uint8) + row * SHAPE.WIDTH + column
        groups, before = 1, 0
        if _group(SHAPE.FORMAT):
            before = tl.load(buffers + number * abi.BUFFER_COLUMNS + abi.BUFFER_FIRST)
            before = (before % _group(SHAPE.FORMAT)).to(tl.int32)
            groups = (before + SHAPE.WIDTH + _group(SHAPE.FORMAT) - 1) // _group(SHAPE.FORMAT)
        size: tl.constexpr = 4 if _scales_of(SHAPE.FORMAT) == abi.SCALES_F32 else 2
        scales = address_of(buffers, number, abi.BUFFER_SCALES) + row * groups * size
        offsets = address_of(buffers, number, abi.BUFFER_OFFSETS) + row * groups
        weight = (values, groups, before + column, scales, offsets)
    return weight


@triton.jit
def tiles_of(weight, row, rows, place, width, SHAPE):
    """Load tiles of `weight[rows, width]` that have the same columns, and rows one after another.

    A tile is `[ROWS, COLUMNS]`, or `[slices, ROWS, columns of a slice]`. With scales, it also has
    one for each run of 16 columns.
    """
    tiles = ()
    tile_rows = tl.arange(0, SHAPE.ROWS)[:, None]
    for tile in tl.static_range(SHAPE.TILES):
        first = row + tile * SHAPE.ROWS
        inside = tile_rows < rows - first
        first = tl.cast(first, tl.int64)
        if _is_plain(SHAPE.FORMAT):
            columns, here = columns_of(place, width, 1, SHAPE.COLUMNS)
            addresses = (
                weight[0] + first * SHAPE.WIDTH + (tile_rows * SHAPE.WIDTH + _of_rows(columns))
            )
            loaded = (tl.load(addresses, mask=inside & _of_rows(here), other=0.0),)
        else:
            loaded = _scaled_tile(weight, first, tile_rows, inside, place, width, SHAPE)
        tiles = tiles + (loaded,)
    return tiles


@triton.jit
def _scaled_tile(weight, first, tile_rows, inside, place, width, SHAPE):
    """Load a tile of few bits, and the scales of its runs of 16 columns."""
    values, groups, before, scales, offsets = weight
    packed: tl.constexpr = _NIBBLES if _kind(SHAPE.FORMAT) == abi.KIND_INT4 else 1
    stride: tl.constexpr = _stride(SHAPE.WIDTH, SHAPE.FORMAT)
    loads = (place[0] // packed, place[1] // packed)
    columns, here = columns_of(loads, tl.cdiv(width, packed), 1, SHAPE.COLUMNS // packed)
    addresses = values + first * stride + (tile_rows * stride + _of_rows(columns))
    stored = tl.load(addresses, mask=inside & _of_rows(here), other=0)
    numbers = _numbers(stored, SHAPE.DTYPE, SHAPE.FORMAT)
    runs, here = columns_of(place, width, STEP, SHAPE.COLUMNS)
    here = inside & _of_rows(here)
    group = tile_rows * groups
    if _group(SHAPE.FORMAT):
        group += _of_rows((before + runs) // _group(SHAPE.FORMAT))
    group += first * groups
    if _has_offsets(SHAPE.FORMAT):
        offset_values = _word_at(offsets + group, here) << 24 >> 24
        numbers -= by_column(offset_values).to(tl.float32).to(numbers.dtype)
    # The interpreter converts only fp32 to bf16.
    return numbers.to(SHAPE.DTYPE), _scale_at(scales, group, here, SHAPE.FORMAT)


@triton.constexpr_function
def _stride(columns, number):
    """Return the numbers that a load sees in some columns of a row."""
    if Format(number).kind != Kind.INT4:
        return columns
    return -(-columns // _PADDED.value) * _PADDED.value // _NIBBLES.value


@triton.jit
def _numbers(stored, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Return the numbers that are stored, before offsets are subtracted, in a dtype or in fp32."""
    if _kind(FORMAT) == abi.KIND_INT4:
        even = tl.join(_above(stored & 15, DTYPE), _above((stored >> 8) & 15, DTYPE))
        odd = tl.join(_above((stored >> 4) & 15, DTYPE), _above((stored >> 12) & 15, DTYPE))
        numbers = tl.join(even, odd).reshape(_widened(stored.shape, _NIBBLES))
        numbers -= _above(tl.full(numbers.shape, 8, tl.int16), DTYPE)
    elif _kind(FORMAT) == abi.KIND_INT8:
        bits = stored.to(tl.int16)
        numbers = _above(bits & 0x7F, DTYPE) - _above(bits & 0x80, DTYPE)
    else:
        bits = stored.to(tl.int16)
        sign = (bits & 0x80) << 8
        if DTYPE == tl.bfloat16 and _by_bits(DTYPE):
            bits = sign | (bits & 0x7F) << 4
            numbers = bits.to(tl.bfloat16, bitcast=True) * _TIMES_BF16
        else:
            bits = sign | (bits & 0x7F) << 7
            numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * _TIMES_FP16
    return numbers


@triton.constexpr_function
def _by_bits(dtype):
    """Return whether numbers of a dtype are made of bits.

    It must have 16 bits. The interpreter does not compute in bf16.
    """
    return not INTERPRETED.value and dtype in (tl.bfloat16, tl.float16)


@triton.jit
def _above(integers, DTYPE: tl.constexpr):
    """Return integers of at most 128 as numbers, all greater by the same power of two, or by 0.

    Conversions take eight times as long as arithmetic.
    """
    if _by_bits(DTYPE):
        base: tl.constexpr = _ABOVE_BF16 if DTYPE == tl.bfloat16 else _ABOVE_FP16
        numbers = (integers | base).to(DTYPE, bitcast=True)
    else:
        numbers = integers.to(tl.float32)
    return numbers


@triton.jit
def _of_rows(columns):
    """Insert a dimension for rows before the last dimension, that of columns."""
    return tl.expand_dims(columns, len(columns.shape) - 1)


@triton.jit
def by_column(runs):
    """Repeat the value of each run of 16 columns for each of its columns."""
    repeated = tl.broadcast_to(tl.expand_dims(runs, len(runs.shape)), _with(runs.shape, STEP))
    return repeated.reshape(_widened(runs.shape, STEP))


@triton.constexpr_function
def _with(shape, count):
    return [*shape, count]


@triton.constexpr_function
def _widened(shape, times):
    return [*shape[:-1], shape[-1] * times]


@triton.jit
def _scale_at(address, group, inside, FORMAT: tl.constexpr):
    """Load the scales of groups in fp32."""
    if _scales_of(FORMAT) == abi.SCALES_F32:
        addresses = (address + 4 * group).to(tl.pointer_type(tl.float32))
        scales = tl.load(addresses, mask=inside, other=0.0)
    elif _scales_of(FORMAT) == abi.SCALES_BF16:
        scales = (_word_at(address + 2 * group, inside) << 16).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(_scales_of(FORMAT) == abi.SCALES_F16)
        bits = _word_at(address + 2 * group, inside).to(tl.int16)
        scales = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return scales


@triton.jit
def _word_at(address, inside):
    """Load the words that hold numbers of up to 4 bytes, shifted until these are lowest.

    Only loads of 4 bytes or more are asynchronous. A word in which a byte can be read can be read.
    """
    words = (address & -4).to(tl.pointer_type(tl.int32))
    return tl.load(words, mask=inside, other=0) >> (8 * (address & 3)).to(tl.int32)


@triton.jit
def place_of(tile, width, SHAPE):
    """Return the first row and place of tiles loaded together, and whether they end their rows.

    The place is where the columns begin, where their slice ends, and whether they are the last of
    it. Tiles are in the order of rows, then of columns. One loop over all tiles can load the next
    ones while it multiplies.
    """
    extent = slice_of(width)
    chunks = chunks_of(width, SHAPE)
    chunk = tile % chunks
    if at_once(SHAPE.SEQUENCES):
        begin = extent * tl.arange(0, SLICES)
        within = chunk * (SHAPE.COLUMNS // SLICES)
        closes = False
    else:
        slice_chunks = (extent + SHAPE.COLUMNS - 1) // SHAPE.COLUMNS
        begin = chunk // slice_chunks * extent
        within = chunk % slice_chunks * SHAPE.COLUMNS
        closes = chunk % slice_chunks == slice_chunks - 1
    row = tile // chunks * (SHAPE.TILES * SHAPE.ROWS)
    return row, (begin + within, begin + extent, closes), chunk == chunks - 1


@triton.jit
def chunks_of(width, SHAPE):
    """Return the number of tiles in which the columns of rows are."""
    extent = slice_of(width)
    if at_once(SHAPE.SEQUENCES):
        count = (extent * SLICES + SHAPE.COLUMNS - 1) // SHAPE.COLUMNS
    else:
        count = (width + extent - 1) // extent * ((extent + SHAPE.COLUMNS - 1) // SHAPE.COLUMNS)
    return count


@triton.jit
def slice_of(width):
    """Return the columns of a slice, of which the last ones may be missing."""
    return (width + SLICES * STEP - 1) // (SLICES * STEP) * STEP


@triton.constexpr_function
def at_once(sequences):
    """Return whether a tile has columns of all slices: one for each warp."""
    return sequences == options.LEAST_SEQUENCES


@triton.jit
def columns_of(place, width, STRIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return each STRIDE-th column of a tile, by slice if it has several, and if it is there."""
    begin = tl.cast(place[0], tl.int32)
    end = tl.cast(place[1], tl.int32)
    several: tl.constexpr = len(begin.shape) > 0
    extent: tl.constexpr = COLUMNS // SLICES if several else COLUMNS
    columns = STRIDE * tl.arange(0, extent // STRIDE)
    if several:
        columns = begin[:, None] + columns[None, :]
        here = (columns < end[:, None]) & (columns < width)
    else:
        columns += begin
        here = (columns < end) & (columns < width)
    return columns, here
