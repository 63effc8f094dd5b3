"""ATen ops that split, slice, index or concatenate values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.ops.head_order import roles_of_parts
from tpcompile.ir.ops.shape import shifted, unsharded
from tpcompile.ir.ops.spec import declare, dim_of, free_cost, require, streaming_cost
from tpcompile.ir.types import REPLICATE, Partial, Shard, ValueType
from tpcompile.ir.values import views

aten = torch.ops.aten
END = 1 << 62
"""Open-ended slices have an end of at least this."""
_WHOLE_NUMBERS = (torch.int64, torch.int32)


def select_rule(self: ValueType, dim: int, index: int) -> ValueType:
    dim = dim_of(self, dim)
    unsharded(self, dim, "select from")
    extent = self.shape[dim]
    inside = isinstance(extent, str) or -extent <= index < extent
    require(inside, "dimension", f"index {index}", f"an index within the extent {extent} of {self}")
    return shifted(self, (*self.shape[:dim], *self.shape[dim + 1 :]), -1, dim)


def slice_rule(
    self: ValueType, dim: int, start: int | None, end: int | None, step: int
) -> ValueType:
    dim = dim_of(self, dim)
    unsharded(self, dim, "slice")
    require(step > 0, "slice", f"step {step}", "a step of at least 1")
    extent = self.shape[dim]
    if isinstance(extent, str):
        require(
            not start and (end is None or end >= END) and step == 1,
            "slice",
            (start, end, step),
            f"the whole symbolic extent {extent}",
        )
        return self
    length = len(range(extent)[slice(start, end, step)])
    return shifted(self, (*self.shape[:dim], length, *self.shape[dim + 1 :]))


def concat_rule(tensors: tuple[ValueType, ...], dim: int = 0) -> ValueType:
    first = tensors[0]
    dim = dim_of(first, dim)
    extents: list[int] = []
    for kind in tensors:
        require(
            kind.dims == first.dims and kind.dtype == first.dtype,
            "concat",
            kind,
            f"the same number of dimensions and the dtype of {first}",
        )
        other_extents = (*kind.shape[:dim], *kind.shape[dim + 1 :])
        fits = other_extents == (*first.shape[:dim], *first.shape[dim + 1 :])
        require(fits, "concat", kind, f"the same other extents as {first}")
        extent = kind.shape[dim]
        require(
            kind.placement == first.placement and not isinstance(first.placement, Partial),
            "same-layout",
            kind,
            f"the same placement as {first}",
        )
        require(
            isinstance(extent, int), "concat", kind, "a known extent along the concatenated axis"
        )
        extents.append(int(extent))
        unsharded(kind, dim, "concatenate")
    return shifted(first, (*first.shape[:dim], sum(extents), *first.shape[dim + 1 :]))


def stack_rule(tensors: tuple[ValueType, ...], dim: int = 0) -> ValueType:
    first = tensors[0]
    dim = dim_of(first, dim, extra=1)
    for kind in tensors:
        require(kind == first, "stack", kind, f"the type of the first value, {first}")
    require(not isinstance(first.placement, Partial), "partial-nonlinear", first, "a summed value")
    return shifted(first, (*first.shape[:dim], len(tensors), *first.shape[dim:]), 1, dim - 1)


def split_rule(
    self: ValueType, split_sizes: tuple[int, ...], dim: int = 0
) -> tuple[ValueType, ...]:
    dim = dim_of(self, dim)
    require(
        sum(split_sizes) == self.shape[dim],
        "split-sizes",
        split_sizes,
        f"global sizes that add up to {self.shape[dim]}",
        "sizes are global, since each rank's sizes are derived from the layout",
    )
    shapes = [(*self.shape[:dim], size, *self.shape[dim + 1 :]) for size in split_sizes]
    layout = self.layout_of(dim)
    roles = roles_of_parts(self, split_sizes, dim)
    if layout is None:
        require(
            not isinstance(self.placement, Partial),
            "partial-nonlinear",
            self,
            "an operand that is already summed",
        )
        return tuple(
            shifted(self, shape).in_role(role) for shape, role in zip(shapes, roles, strict=True)
        )
    segments = layout.segments if isinstance(layout, FusedLayout) else ()
    parts = _joined_segments(segments, split_sizes)
    require(
        parts is not None,
        "split-segments",
        f"sizes {split_sizes} of {self}",
        f"the sizes of the fused parts, {tuple(segment.size for segment in segments)}",
    )
    assert parts is not None
    return tuple(
        ValueType(shape, self.dtype, Shard(dim, part), role)
        for shape, part, role in zip(shapes, parts, roles, strict=True)
    )


def _joined_segments(
    segments: Sequence[Layout], sizes: Sequence[int]
) -> list[Layout | FusedLayout] | None:
    """Return the layouts of parts with these sizes, each of one or more segments, or None."""
    left, parts = list(segments), list[Layout | FusedLayout]()
    for size in sizes:
        part: list[Layout] = []
        while left and sum(segment.size for segment in part) < size:
            part.append(left.pop(0))
        if sum(segment.size for segment in part) != size:
            return None
        parts.append(part[0] if len(part) == 1 else FusedLayout(tuple(part)))
    return None if left else parts


def chunk_rule(self: ValueType, chunks: int, dim: int = 0) -> tuple[ValueType, ...]:
    extent = self.shape[dim_of(self, dim)]
    require(isinstance(extent, int), "split", self, "a known extent")
    assert isinstance(extent, int)
    size = -(-extent // chunks)
    return split_rule(self, tuple(min(size, extent - low) for low in range(0, extent, size)), dim)


def split_localize(
    result: tuple[ValueType, ...], rank: int, dim: int = 0, **_: Any
) -> dict[str, Any]:
    return {"split_sizes": [kind.local_shape(rank)[dim % kind.dims] for kind in result]}


def rows_rule(self: ValueType, dim: int, index: ValueType) -> ValueType:
    dim = dim_of(self, dim)
    unsharded(self, dim, "index")
    valid = index.placement == REPLICATE and index.dims == 1
    require(valid, "rows", index, "a one-dimensional tensor of rows, replicated on every rank")
    require(index.dtype in _WHOLE_NUMBERS, "rows", index, "row numbers, not a mask")
    return shifted(self, (*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :]))


def index_rule(self: ValueType, indices: tuple[ValueType | None, ...]) -> ValueType:
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    require(len(places) == 1, "rows", f"{len(places)} indices", "an index along one dimension")
    return rows_rule(self, *places[0])


declare(aten.select.int, select_rule, free_cost, value=views.select)
declare(aten.slice.Tensor, slice_rule, free_cost, value=views.slice_of)
declare(aten.cat.default, concat_rule, streaming_cost, value=views.concatenation)
declare(aten.stack.default, stack_rule, streaming_cost, value=views.stack)
declare(
    aten.split_with_sizes.default,
    split_rule,
    free_cost,
    split_localize,
    takes_roles=True,
    value=views.split,
)
declare(aten.chunk.default, chunk_rule, free_cost, value=views.chunk)
declare(aten.index_select.default, rows_rule, streaming_cost, value=views.index_select)
declare(aten.index.Tensor, index_rule, streaming_cost, value=views.index)
