"""The embedding rows of the tokens."""

import triton
import triton.language as tl

from . import abi
from .access import start_of
from .numbers import rounded

_COLUMNS = tl.constexpr(256)


@triton.jit
def embed(
    words,
    buffers,
    own,
    BATCH: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
):
    """Copy some columns of the tokens' rows; a token whose row is on another rank gets zeros."""
    tokens = start_of(buffers, tl.load(words + abi.EMBED_TOKENS), tl.int32)
    table = start_of(buffers, tl.load(words + abi.EMBED_TABLE), DTYPE)
    out = start_of(buffers, tl.load(words + abi.EMBED_OUT), OUT)
    first = tl.load(words + abi.EMBED_COLUMNS)
    last = tl.load(words + abi.EMBED_COLUMNS + 1)
    for sequence in range(BATCH):
        row = tl.load(tokens + sequence) - tl.load(words + abi.EMBED_FIRST)
        held = (row >= 0) & (row < tl.load(words + abi.EMBED_ROWS))
        end = tl.where(held, last, 0)
        here = table + tl.cast(row, tl.int64) * WIDTH
        for start in range(first, last, _COLUMNS):
            columns = start + tl.arange(0, _COLUMNS)
            inside = columns < last
            found = tl.load(here + columns, mask=columns < end, other=0.0).to(tl.float32) + 0.0
            tl.store(out + sequence * WIDTH + columns, rounded(found, OUT), mask=inside)
