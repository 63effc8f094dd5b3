"""The embedding rows of the tokens."""

import triton
import triton.language as tl

from . import abi
from .access import start_of
from .numbers import rounded
from .weights import STEP, by_column, rows_of, tiles_of


@triton.jit
def embed(words, buffers, scratch, SHAPE):
    """Copy some columns of the tokens' rows; a token whose row is on another rank gets zeros."""
    tokens = start_of(buffers, tl.load(words + abi.EMBED_TOKENS), tl.int32)
    table = tl.load(words + abi.EMBED_TABLE)
    out = start_of(buffers, tl.load(words + abi.EMBED_OUT), SHAPE.OUT)
    first = tl.load(words + abi.EMBED_COLUMNS)
    last = tl.load(words + abi.EMBED_COLUMNS + 1)
    for sequence in range(SHAPE.BATCH):
        row = tl.load(tokens + sequence) - tl.load(words + abi.EMBED_FIRST)
        held = (row >= 0) & (row < tl.load(words + abi.EMBED_ROWS))
        end = tl.where(held, last, 0)
        here = rows_of(buffers, table, row, 0, SHAPE)
        for start in range(first // STEP * STEP, last, SHAPE.COLUMNS):
            place = (start, end, False)
            tile = tiles_of(here, 0, 1, place, SHAPE.WIDTH, SHAPE)[0]
            values = tile[0].to(tl.float32)
            if len(tile) > 1:
                values *= by_column(tile[1])
            columns = start + tl.arange(0, SHAPE.COLUMNS)[None, :]
            inside = (columns >= first) & (columns < last)
            addresses = out + sequence * SHAPE.WIDTH + columns
            tl.store(addresses, rounded(values + 0.0, SHAPE.OUT), mask=inside)
