"""Addresses in the table of buffers."""

import triton
import triton.language as tl

from . import abi


@triton.jit
def start_of(buffers, number, DTYPE: tl.constexpr):
    """Return a pointer to the first element of a buffer."""
    address = tl.load(buffers + number * abi.BUFFER_COLUMNS + abi.BUFFER_ADDRESS)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def address_of(buffers, number, COLUMN: tl.constexpr):
    """Return the byte address of a further component of a weight at this column."""
    return tl.load(buffers + number * abi.BUFFER_COLUMNS + COLUMN)


@triton.jit
def stride_of(buffers, number, DIM: tl.constexpr):
    """Return the stride of a dimension of a buffer, in elements."""
    return tl.load(buffers + number * abi.BUFFER_COLUMNS + abi.BUFFER_STRIDES + DIM)
