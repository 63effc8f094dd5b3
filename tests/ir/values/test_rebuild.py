"""Pieces that an index reaches: in each run of a variable it is in one of them."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir.values.indices import EXTENTS, indices, value_at
from tpcompile.ir.values.index import Index
from tpcompile.ir.values.rebuild import threshold_split


@settings(max_examples=200, deadline=None)
@given(indices(), st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_pieces_that_an_index_reaches(index: Index, extents: list[int]) -> None:
    split = threshold_split(index, tuple(extents))
    if split is None:
        return
    of, sizes = split
    assert sum(sizes) == of.extent
    edges = [sum(extents[:place]) for place in range(1, len(extents))]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    for start, size in zip(starts, sizes, strict=True):
        numbers = {
            sum(value_at(index, places) >= edge for edge in edges)
            for places in product(*map(range, EXTENTS))
            if start <= places[of.name] < start + size
        }
        assert len(numbers) <= 1
