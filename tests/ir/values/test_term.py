"""Tests of the normal form of pieces along an axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tpcompile.ir.values.term import Terms
from tpcompile.ir.values.value import Value, joined, own_indices, sliced

_ROWS, _COLUMNS = 48, 4


def _weight(terms: Terms) -> Value:
    shape = (_ROWS, _COLUMNS)
    source = terms.source("tensor", "w", torch.float32)
    return Value(shape, torch.float32, terms.read(source, own_indices(shape)))


def _joined_rows(terms: Terms, edges: list[tuple[int, int]]) -> Value:
    weight = _weight(terms)
    parts = [sliced(terms, weight, 0, start, stop - start) for start, stop in edges]
    return joined(terms, parts, 0)


@pytest.mark.parametrize("edges", [(0, 16, 32, 48), (0, 8, 48), (0, 40, 44, 48)])
def test_slices_side_by_side_are_the_whole(edges: tuple[int, ...]) -> None:
    terms = Terms()
    slices = list(pairwise(edges))
    assert _joined_rows(terms, slices).body is _weight(terms).body


@pytest.mark.parametrize(
    "slices",
    [
        [(16, 32), (0, 16), (32, 48)],  # in another order
        [(0, 16), (16, 32), (16, 32)],  # a slice twice
        [(0, 16), (17, 32), (32, 48)],  # a row is missing
    ],
)
def test_other_slices_are_not_the_whole(slices: list[tuple[int, int]]) -> None:
    terms = Terms()
    body = _joined_rows(terms, slices).body
    assert body.kind == "cases" and body is not _weight(terms).body
