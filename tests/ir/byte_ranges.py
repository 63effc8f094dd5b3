"""The bytes of checkpoint tensors that the evaluation of a recipe reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from tpcompile.ir.layout import Interval
from tpcompile.ir.pieces import Piece, merge, pieces
from tpcompile.ir.recipe import Recipe


def byte_ranges(recipe: Recipe, itemsize: int) -> dict[str, list[Interval]]:
    """Return, for each checkpoint tensor, the byte ranges within it that evaluation reads."""
    ranges_by_tensor: dict[str, list[Interval]] = {}
    for piece in pieces(recipe):
        ranges = ranges_by_tensor.setdefault(piece.tensor, [])
        ranges += [(a * itemsize, b * itemsize) for a, b in _flat_ranges(piece)]
    return {name: merge(ranges) for name, ranges in ranges_by_tensor.items()}


def _flat_ranges(piece: Piece) -> Iterator[Interval]:
    """Yield the runs of consecutive elements that the piece reads from its row-major tensor."""
    strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
    if not piece.shape:
        yield 0, 1
        return
    inner = len(piece.shape) - 1
    while inner and piece.source[inner] == (range(piece.shape[inner]),):
        inner -= 1
    outer = [[i for run in runs for i in run] for runs in piece.source[:inner]]
    spans = [
        (r.start, r.stop) if r.step == 1 else (i, i + 1)
        for r in piece.source[inner]
        for i in ([r.start] if r.step == 1 else r)
    ]
    for index in product(*outer):
        base = sum(i * stride for i, stride in zip(index, strides, strict=False))
        for start, stop in spans:
            yield base + start * strides[inner], base + stop * strides[inner]
