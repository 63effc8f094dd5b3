"""Columns of numbers for the page: little-endian arrays, one after another, with an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def pack_columns(columns: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Return the index and the bytes of columns: for each name its dtype, offset and count.

    Every column begins at a multiple of 8 bytes, so that a browser can view it in place.
    """
    index: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, column in columns.items():
        data = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<")).tobytes()
        index[name] = [column.dtype.name, offset, int(column.size)]
        padding = -len(data) % 8
        parts += [data, bytes(padding)]
        offset += len(data) + padding
    return index, b"".join(parts)


def small(numbers: Iterable[int]) -> np.ndarray:
    """Return whole numbers as a column of the narrowest type that the page can view."""
    column = np.fromiter(numbers, np.int64)
    least, most = (int(column.min()), int(column.max())) if column.size else (0, 0)
    for kind in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return column.astype(kind)
    return column.astype(np.float64)
