"""The embedding rows of the tokens."""

import triton
import triton.language as tl

from . import abi
from .access import start_of
from .numbers import rounded
from .weights import STEP, by_column, rows_of, tiles_of

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
    FORMAT: tl.constexpr,
):
    """Copy some columns of the tokens' rows; a token whose row is on another rank gets zeros."""
    tokens = start_of(buffers, tl.load(words + abi.EMBED_TOKENS), tl.int32)
    table = tl.load(words + abi.EMBED_TABLE)
    out = start_of(buffers, tl.load(words + abi.EMBED_OUT), OUT)
    first = tl.load(words + abi.EMBED_COLUMNS)
    last = tl.load(words + abi.EMBED_COLUMNS + 1)
    for sequence in range(BATCH):
        row = tl.load(tokens + sequence) - tl.load(words + abi.EMBED_FIRST)
        held = (row >= 0) & (row < tl.load(words + abi.EMBED_ROWS))
        end = tl.where(held, last, 0)
        here = rows_of(buffers, table, row, 0, WIDTH, DTYPE, FORMAT)
        for start in range(first // STEP * STEP, last, _COLUMNS):
            place = (start, end, False)
            tile = tiles_of(here, 0, 1, place, WIDTH, WIDTH, 1, 1, _COLUMNS, DTYPE, FORMAT)[0]
            found = tile[0].to(tl.float32)
            if len(tile) > 1:
                found *= by_column(tile[1])
            columns = start + tl.arange(0, _COLUMNS)[None, :]
            inside = (columns >= first) & (columns < last)
            tl.store(out + sequence * WIDTH + columns, rounded(found + 0.0, OUT), mask=inside)
