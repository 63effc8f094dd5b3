"""Sums across ranks and slots, which are added to the residual."""

import triton
import triton.language as tl

from . import abi
from .access import start_of, stride_of
from .numbers import rounded

_COLUMNS = tl.constexpr(256)


@triton.jit
def all_reduce(words, buffers, scratch, SHAPE):
    """Add the terms of all ranks in order, the bias and the residual, for some columns."""
    terms = tl.load(words + abi.ALL_REDUCE_TERMS)
    stride = stride_of(buffers, terms, 0)
    number = tl.load(words + abi.ALL_REDUCE_OUT)
    out = start_of(buffers, number, SHAPE.DTYPE)
    out_stride = stride_of(buffers, number, 0)
    first = tl.load(words + abi.ALL_REDUCE_COLUMNS)
    last = tl.load(words + abi.ALL_REDUCE_COLUMNS + 1)
    for sequence in range(SHAPE.BATCH):
        for start in range(first, last, _COLUMNS):
            columns = start + tl.arange(0, _COLUMNS)
            inside = columns < last
            sums = tl.zeros([_COLUMNS], tl.float32)
            for rank in range(SHAPE.RANKS):
                own_terms = start_of(buffers, terms + rank, tl.float32)
                for slot in range(SHAPE.SLOTS):
                    offset = (slot * SHAPE.BATCH + sequence) * stride
                    sums += tl.load(own_terms + offset + columns, mask=inside, other=0.0)
            if SHAPE.BIAS:
                bias = start_of(buffers, tl.load(words + abi.ALL_REDUCE_BIAS), SHAPE.DTYPE)
                sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
            offsets = sequence * out_stride + columns
            if SHAPE.RESIDUAL:
                residual = start_of(buffers, tl.load(words + abi.ALL_REDUCE_RESIDUAL), SHAPE.DTYPE)
                sums += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + offsets, rounded(sums, SHAPE.DTYPE), mask=inside)
