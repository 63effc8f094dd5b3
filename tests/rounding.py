"""Weights of few bits, and the formula of products with inputs rounded to int8, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy
import torch

from tpcompile.ir.format import Format, Kind
from tpcompile.ir.words import packed

Parts = dict[str, torch.Tensor]


def made_parts(stored: Format, rows: int, columns: int) -> Parts:
    """Return random components of a weight, before the integers of 4 bits are packed."""
    generator = torch.Generator().manual_seed(int(stored) % 997)
    most = 8 if stored.kind == Kind.INT4 else 128
    values, scales, *offsets = stored.components
    shape = rows, scales.width(0, columns)
    parts = {
        values.suffix: torch.randint(-most, most, (rows, columns), generator=generator),
        scales.suffix: torch.rand(shape, generator=generator) + 0.1,
    }
    for component in offsets:
        parts[component.suffix] = torch.randint(-most, most, shape, generator=generator)
    return parts


def held_parts(stored: Format, parts: Mapping[str, torch.Tensor], start: int, stop: int) -> Parts:
    """Return the components of some columns as they are in memory."""
    values, scales, *offsets = stored.components
    integers = parts[values.suffix][:, start:stop].to(torch.int8)
    held = {values.suffix: packed(integers, 4) if stored.kind == Kind.INT4 else integers}
    for component in (scales, *offsets):
        held[component.suffix] = parts[component.suffix][:, slice(*component.span(start, stop))].to(
            component.dtype.torch
        )
    return held


def formula(
    x: torch.Tensor, stored: Format, parts: Mapping[str, torch.Tensor], edges: Sequence[int] = ()
) -> torch.Tensor:
    """Multiply `x[tokens, columns]` by the rows of a weight; inputs are cut at `edges`, too."""
    values, scales, *offsets = (parts[component.suffix].numpy() for component in stored.components)
    group = stored.components[1].columns or x.shape[1]
    block = group if group <= 128 else 128
    columns = x.shape[1]
    starts = sorted({*edges, *range(0, columns, block), columns})
    products = numpy.zeros((len(x), len(values)))
    for start, stop in pairwise(starts):
        inputs = x[:, start:stop].float().numpy()
        most = numpy.abs(inputs).max(1, keepdims=True)
        factor = numpy.divide(numpy.float32(127), most, out=numpy.zeros_like(most), where=most > 0)
        integers = numpy.rint(inputs * factor).astype(numpy.int64)
        assert numpy.abs(integers).max() <= 127
        for place in range(start // group, (stop - 1) // group + 1):
            first, last = max(start, place * group), min(stop, (place + 1) * group)
            weight = values[:, first:last].astype(numpy.int64)
            if offsets:
                weight = weight - offsets[0][:, place : place + 1]
            sums = integers[:, first - start : last - start] @ weight.T
            products += sums * (most / numpy.float32(127)) * scales[:, place]
    return torch.from_numpy(products)
