"""Columns: each has the narrowest type that a browser can view, at an aligned place."""

from __future__ import annotations

import numpy as np
import pytest

from tpcompile.inspect.explorer.columns import pack_columns, small


def test_columns_begin_at_multiples_of_eight_bytes() -> None:
    columns = {"a": np.array([1, 2, 3], np.uint8), "b": np.array([-1, 7], np.int32)}
    index, blob = pack_columns(columns)
    assert index == {"a": ["uint8", 0, 3], "b": ["int32", 8, 2]}
    assert blob == bytes([1, 2, 3, 0, 0, 0, 0, 0]) + np.array([-1, 7], "<i4").tobytes()


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ([], "uint8"),
        ([0, 255], "uint8"),
        ([-1, 127], "int8"),
        ([-1, 128], "int16"),
        ([0, 65_536], "uint32"),
        ([-1, 2**31 - 1], "int32"),
        ([0, 2**32 - 1], "uint32"),
        ([-1, 2**31], "float64"),
        ([0, 2**53], "float64"),
    ],
)
def test_the_narrowest_type(numbers: list[int], kind: str) -> None:
    array = small(numbers)
    assert (array.dtype.name, array.tolist()) == (kind, numbers)
