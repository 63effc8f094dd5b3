"""Pieces: recipes as lists of box copies, to evaluate them and to compute their byte ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch

from tpcompile.ir.layout import Interval
from tpcompile.ir.recipe import (
    Concat,
    Pad,
    Permute,
    Recipe,
    Slice,
    Tensor,
    shape_of,
    tensors_of,
    with_item,
)

Read = Callable[[str, tuple[slice, ...]], torch.Tensor]
"""A callback that reads a part of a checkpoint tensor, given its name."""
_ROWS = 1 << 14
"""The rows that are read at a time, so that decoded or converted values stay in CPU caches."""
Runs = tuple[range, ...]
"""Indices along one dimension, in order, as ranges."""


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor, and the box of the parameter that it is copied to."""

    tensor: str
    shape: tuple[int, ...]
    source: tuple[Runs, ...]
    target: tuple[Interval, ...]


def pieces(recipe: Recipe) -> tuple[Piece, ...]:
    """Flatten a recipe to box copies; regions that no piece covers are zero."""
    match recipe:
        case Tensor(name, shape):
            whole = tuple((range(extent),) for extent in shape)
            return (Piece(name, shape, whole, tuple((0, extent) for extent in shape)),)
        case Slice(source, dim, start, stop):
            return restrict(pieces(source), dim, ((start, stop),))
        case Concat(sources, dim):
            ends = [0, *accumulate(shape_of(source)[dim] for source in sources)]
            return tuple(
                _moved(piece, dim, offset)
                for source, offset in zip(sources, ends, strict=False)
                for piece in pieces(source)
            )
        case Permute():
            return _permuted(recipe)
        case Pad(source=source):
            return pieces(source)


def restrict(whole: Iterable[Piece], dim: int, intervals: Iterable[Interval]) -> tuple[Piece, ...]:
    """Return the pieces of a value restricted to these intervals of one dimension."""
    restricted = []
    offset = 0
    for start, stop in intervals:
        for piece in whole:
            low, high = piece.target[dim]
            first, last = max(start, low), min(stop, high)
            if first < last:
                runs = _cut(piece.source[dim], first - low, last - low)
                cut = Piece(
                    piece.tensor,
                    piece.shape,
                    with_item(piece.source, dim, runs),
                    with_item(piece.target, dim, (first - start + offset, last - start + offset)),
                )
                restricted.append(cut)
        offset += stop - start
    return tuple(restricted)


def evaluate(recipe: Recipe, read: Read, into: torch.Tensor | None = None) -> torch.Tensor:
    """Evaluate a recipe to a tensor that owns its memory, or to `into`, which must be zero."""
    if into is not None:
        whole = pieces(recipe)
        block_rows = max(1, _ROWS // max(1, math.prod(into.shape[1:-1])))
        for start in range(0, len(into), block_rows):
            rows = into[start : start + block_rows]
            for piece in restrict(whole, 0, ((start, start + block_rows),)):
                rows[tuple(slice(*box) for box in piece.target)] = _read(piece, read).detach()
        return into
    parts = [(piece, _read(piece, read)) for piece in pieces(recipe)]
    shape = shape_of(recipe)
    if not parts:
        tensor = next(tensors_of(recipe))
        nothing = read(tensor.name, tuple(slice(0, 0) for _ in tensor.shape))
        return nothing.new_zeros(shape)
    if len(parts) == 1 and tuple(parts[0][1].shape) == shape:
        value = parts[0][1].contiguous()
        owns_memory = value.untyped_storage().nbytes() == value.nbytes and value._base is None
        return value if owns_memory else value.clone()
    result = parts[0][1].new_zeros(shape)
    for piece, value in parts:
        result[tuple(slice(*box) for box in piece.target)] = value
    return result


def unshard(
    name: str, shape: tuple[int, ...], shards: Iterable[tuple[Recipe, torch.Tensor]]
) -> torch.Tensor:
    """Reassemble a checkpoint tensor from the ranks' shards, each given with its recipe.

    Shards are consumed only until the tensor is complete.
    """
    result: torch.Tensor | None = None
    written = torch.zeros(shape, dtype=torch.bool)
    for recipe, value in shards:
        if result is None:
            result = value.new_empty(shape)
        for piece in pieces(recipe):
            if piece.tensor == name:
                for source, target in _boxes(piece):
                    result[source] = value[target]
                    written[source] = True
        if bool(written.all()):
            return result
    raise ValueError(f"the ranks do not hold all of {name}")


def _boxes(piece: Piece) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the parts of a piece that are slices of both the tensor and the parameter."""
    sides = []
    for runs, (start, _) in zip(piece.source, piece.target, strict=True):
        starts = accumulate((len(run) for run in runs), initial=start)
        sides.append(
            [
                (slice(run.start, run.stop, run.step), slice(first, first + len(run)))
                for run, first in zip(runs, starts, strict=False)
            ]
        )
    for box in product(*sides):
        yield tuple(source for source, _ in box), tuple(target for _, target in box)


def merge(ranges: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint intervals, adjacent ones joined."""
    merged: list[Interval] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _moved(piece: Piece, dim: int, offset: int) -> Piece:
    start, stop = piece.target[dim]
    target = with_item(piece.target, dim, (start + offset, stop + offset))
    return Piece(piece.tensor, piece.shape, piece.source, target)


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    """Return positions `start` to `stop` of the indices in `runs`."""
    parts = []
    for run in runs:
        part = run[max(start, 0) : max(stop, 0)]
        if len(part):
            parts.append(part)
        start, stop = start - len(run), stop - len(run)
    return tuple(parts)


def _permuted(recipe: Permute) -> tuple[Piece, ...]:
    dim, view = recipe.dim, recipe.view
    rows = np.arange(math.prod(view)).reshape(view).transpose(recipe.order).ravel().tolist()
    source = pieces(recipe.source)
    if len(source) == 1 and source[0].target[dim] == (0, len(rows)):
        indices = [index for run in source[0].source[dim] for index in run]
        runs = _runs([indices[row] for row in rows])
        return (replace(source[0], source=with_item(source[0].source, dim, runs)),)
    moved = (
        _moved(piece, dim, place)
        for place, row in enumerate(rows)
        for piece in restrict(source, dim, ((row, row + 1),))
    )
    return _joined(moved, dim)


def _runs(indices: list[int]) -> Runs:
    """Group indices into ranges with a step: 0, 8, 1, 9 become range(0, 9, 8), range(1, 10, 8)."""
    runs: list[range] = []
    for index in indices:
        last = runs[-1] if runs else range(0)
        step = index - last[-1] if last else 0
        if step > 0 and (len(last) == 1 or step == last.step):
            runs[-1] = range(last[0], index + 1, step)
        else:
            runs.append(range(index, index + 1))
    return tuple(runs)


def _joined(unjoined: Iterable[Piece], dim: int) -> tuple[Piece, ...]:
    """Join pieces that are adjacent along `dim` and agree in all other dimensions."""
    last: dict[Any, Piece] = {}
    done: list[Piece] = []
    for piece in unjoined:
        key = (piece.tensor, with_item(piece.source, dim, ()), with_item(piece.target, dim, (0, 0)))
        before = last.get(key)
        if before and before.target[dim][1] == piece.target[dim][0]:
            runs = before.source[dim] + piece.source[dim]
            box = (before.target[dim][0], piece.target[dim][1])
            piece = Piece(
                piece.tensor,
                piece.shape,
                with_item(piece.source, dim, runs),
                with_item(piece.target, dim, box),
            )
        elif before:
            done.append(before)
        last[key] = piece
    return (*done, *last.values())


def _read(piece: Piece, read: Read) -> torch.Tensor:
    """Read the box of a piece, without reading any element outside it."""
    spans = [
        merge((i, i + 1) for run in runs for i in run)
        if _scattered(runs)
        else [(runs[0].start, runs[0].stop)]
        for runs in piece.source
    ]
    value = _read_spans(piece.tensor, spans, (), read)
    for dim, runs in enumerate(piece.source):
        if _scattered(runs):
            held = [i for start, stop in spans[dim] for i in range(start, stop)]
            place = {index: position for position, index in enumerate(held)}
            wanted = [place[i] for run in runs for i in run]
            if wanted != list(range(len(held))):
                value = value.index_select(dim, torch.tensor(wanted))
    return value


def _scattered(runs: Runs) -> bool:
    return len(runs) > 1 or runs[0].step != 1


def _read_spans(
    name: str, spans: list[list[Interval]], chosen: tuple[slice, ...], read: Read
) -> torch.Tensor:
    """Read the product of the intervals of all dimensions, with one read per box."""
    dim = len(chosen)
    if dim == len(spans):
        return read(name, chosen)
    parts = [
        _read_spans(name, spans, (*chosen, slice(start, stop)), read) for start, stop in spans[dim]
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
