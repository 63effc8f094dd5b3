"""The ATen ops that move data without computing: views, splits, slices, rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.ops.head_order import role_of_heads, roles_of_parts
from tpcompile.ir.ops.spec import (
    SPECS,
    OpSpec,
    declare,
    dim_of,
    free_cost,
    refuse,
    require,
    streaming_cost,
)
from tpcompile.ir.types import REPLICATE, AnyType, Dim, Partial, Shard, SymbolType, ValueType

aten = torch.ops.aten
END = 1 << 62
"""Open-ended slices have an end of at least this."""
_WHOLE_NUMBERS = (torch.int64, torch.int32)


def _unsharded(kind: ValueType, dim: int, doing: str) -> None:
    if kind.layout_of(dim) is not None:
        refuse("whole-axis", kind, f"dimension {dim} whole on every rank, to {doing} it")


def _shifted(kind: ValueType, shape: Sequence[Dim], moved: int) -> ValueType:
    """Return a type with the new shape and the placement's dimension shifted by `moved`."""
    placement = kind.placement
    if isinstance(placement, Shard):
        placement = Shard(placement.dim + moved, placement.layout)
    return ValueType(tuple(shape), kind.dtype, placement)


def view_rule(self: ValueType, size: tuple[Any, ...] = (), shape: Any = None) -> ValueType:
    require(
        self.placement == REPLICATE,
        "view",
        self,
        "a replicated value",
        "write the view as unflatten or flatten (pass canonicalize)",
    )
    wanted = [s.symbol if isinstance(s, SymbolType) else s for s in (shape or size)]
    names = [extent for extent in self.shape if isinstance(extent, str)]
    require(
        names == [s for s in wanted if isinstance(s, str)],
        "view",
        wanted,
        f"the same symbolic extents as {self}",
    )
    known, total = 1, 1
    for extent in wanted:
        known *= extent if isinstance(extent, int) and extent > 0 else 1
    for extent in self.shape:
        total *= extent if isinstance(extent, int) else 1
    result = tuple(total // known if extent == -1 else extent for extent in wanted)
    require(
        total % known == 0 and (wanted.count(-1) == 1 or known == total),
        "view",
        wanted,
        f"as many elements as {self}",
    )
    return ValueType(result, self.dtype)


def transpose_rule(self: ValueType, dim0: int, dim1: int) -> ValueType:
    order = list(range(self.dims))
    dim0, dim1 = dim_of(self, dim0), dim_of(self, dim1)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    placement = self.placement
    if isinstance(placement, Shard):
        placement = Shard(order.index(placement.dim), placement.layout)
    return ValueType(tuple(self.shape[i] for i in order), self.dtype, placement)


def unsqueeze_rule(self: ValueType, dim: int) -> ValueType:
    dim = dim_of(self, dim, extra=1)
    behind = isinstance(self.placement, Shard) and self.placement.dim >= dim
    return _shifted(self, (*self.shape[:dim], 1, *self.shape[dim:]), int(behind))


def select_rule(self: ValueType, dim: int, index: int) -> ValueType:
    dim = dim_of(self, dim)
    _unsharded(self, dim, "select from")
    extent = self.shape[dim]
    inside = isinstance(extent, str) or -extent <= index < extent
    require(inside, "dimension", f"index {index}", f"an index within the extent {extent} of {self}")
    behind = isinstance(self.placement, Shard) and self.placement.dim > dim
    return _shifted(self, (*self.shape[:dim], *self.shape[dim + 1 :]), -int(behind))


def slice_rule(
    self: ValueType, dim: int, start: int | None, end: int | None, step: int
) -> ValueType:
    dim = dim_of(self, dim)
    _unsharded(self, dim, "slice")
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
    return _shifted(self, (*self.shape[:dim], length, *self.shape[dim + 1 :]), 0)


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
        others = (*kind.shape[:dim], *kind.shape[dim + 1 :])
        fits = others == (*first.shape[:dim], *first.shape[dim + 1 :])
        require(fits, "concat", kind, f"the same other extents as {first}")
        extent = kind.shape[dim]
        require(
            kind.placement == first.placement and not isinstance(first.placement, Partial),
            "same-layout",
            kind,
            f"the same placement as {first}",
        )
        require(
            isinstance(extent, int), "concat", kind, "a known extent along the joined dimension"
        )
        extents.append(int(extent))
        _unsharded(kind, dim, "join")
    return _shifted(first, (*first.shape[:dim], sum(extents), *first.shape[dim + 1 :]), 0)


def unflatten_rule(self: ValueType, dim: int, sizes: tuple[int, ...]) -> ValueType:
    dim = dim_of(self, dim)
    extent = self.shape[dim]
    require(len(sizes) == 2 and sizes[0] == -1, "unflatten", sizes, "[-1, width]")
    width = sizes[1]
    require(
        isinstance(extent, int) and extent % width == 0,
        "unflatten",
        self,
        f"an extent that is a multiple of {width}",
    )
    assert isinstance(extent, int)
    shape = (*self.shape[:dim], extent // width, width, *self.shape[dim + 1 :])
    role = role_of_heads(self, dim, width)
    layout = self.layout_of(dim)
    if layout is None:
        behind = isinstance(self.placement, Shard) and self.placement.dim > dim
        return _shifted(self, shape, int(behind)).in_role(role)
    whole = isinstance(layout, Layout) and layout.grain == width
    require(
        whole,
        "whole-heads",
        f"{self} in pieces of {getattr(layout, 'grain', layout)}",
        f"parts made of whole heads of {width}",
        "a per-head norm or a rotation must see the whole head",
    )
    assert isinstance(layout, Layout)
    return ValueType(shape, self.dtype, Shard(dim, layout.with_grain(1)), role)


def flatten_rule(self: ValueType, start_dim: int = 0, end_dim: int = -1) -> ValueType:
    start, end = dim_of(self, start_dim), dim_of(self, end_dim)
    require(end == start + 1, "flatten", (start_dim, end_dim), "two adjacent dimensions")
    outer, inner = self.shape[start], self.shape[end]
    require(isinstance(outer, int) and isinstance(inner, int), "flatten", self, "known extents")
    assert isinstance(outer, int) and isinstance(inner, int)
    _unsharded(self, end, "flatten")
    shape = (*self.shape[:start], outer * inner, *self.shape[end + 1 :])
    layout = self.layout_of(start)
    if layout is None:
        behind = isinstance(self.placement, Shard) and self.placement.dim > end
        return _shifted(self, shape, -int(behind))
    require(isinstance(layout, Layout), "flatten", self, "one logical axis")
    assert isinstance(layout, Layout)
    return ValueType(shape, self.dtype, Shard(start, layout.with_grain(layout.grain * inner)))


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
            _shifted(self, shape, 0).in_role(role)
            for shape, role in zip(shapes, roles, strict=True)
        )
    segments = layout.segments if isinstance(layout, FusedLayout) else ()
    require(
        tuple(segment.size for segment in segments) == split_sizes,
        "split-segments",
        f"sizes {split_sizes} of {self}",
        f"the sizes of the fused parts, {tuple(segment.size for segment in segments)}",
    )
    return tuple(
        ValueType(shape, self.dtype, Shard(dim, segment), role)
        for shape, segment, role in zip(shapes, segments, roles, strict=True)
    )


def split_localize(
    result: tuple[ValueType, ...], rank: int, dim: int = 0, **_: Any
) -> dict[str, Any]:
    return {"split_sizes": [kind.local_shape(rank)[dim % kind.dims] for kind in result]}


def rows_rule(self: ValueType, dim: int, index: ValueType) -> ValueType:
    dim = dim_of(self, dim)
    _unsharded(self, dim, "pick rows of")
    good = index.placement == REPLICATE and index.dims == 1
    require(good, "rows", index, "a one-dimensional list of rows, replicated on every rank")
    require(index.dtype in _WHOLE_NUMBERS, "rows", index, "row numbers, not a mask")
    return _shifted(self, (*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :]), 0)


def index_rule(self: ValueType, indices: tuple[ValueType | None, ...]) -> ValueType:
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    require(len(places) == 1, "rows", f"{len(places)} indices", "an index along one dimension")
    return rows_rule(self, *places[0])


def extent_rule(self: ValueType, dim: int) -> SymbolType:
    dim = dim_of(self, dim)
    _unsharded(self, dim, "count")
    extent = self.shape[dim]
    require(isinstance(extent, str), "symbol", self, "a symbolic extent")
    return SymbolType(str(extent))


def identity_rule(self: ValueType, **_: Any) -> ValueType:
    return self


def dropout_rule(input: ValueType, p: float, train: bool) -> ValueType:
    require(not train, "dropout", f"p={p} in training", "a model in evaluation mode")
    return input


def item_rule(a: tuple[ValueType, ...], b: int) -> AnyType:
    require(
        isinstance(a, tuple) and -len(a) <= b < len(a),
        "item",
        f"item {b} of {a}",
        "an existing item",
    )
    return a[b]


declare(aten.view.default, view_rule, free_cost)
declare(aten.reshape.default, view_rule, free_cost)
declare(aten.transpose.int, transpose_rule, free_cost)
declare(aten.unsqueeze.default, unsqueeze_rule, free_cost)
declare(aten.select.int, select_rule, free_cost)
declare(aten.slice.Tensor, slice_rule, free_cost)
declare(aten.cat.default, concat_rule, streaming_cost)
declare(aten.unflatten.int, unflatten_rule, free_cost, takes_roles=True)
declare(aten.flatten.using_ints, flatten_rule, free_cost)
declare(aten.split_with_sizes.default, split_rule, free_cost, split_localize, takes_roles=True)
declare(aten.index_select.default, rows_rule, streaming_cost)
declare(aten.index.Tensor, index_rule, streaming_cost)
declare(aten.dropout.default, dropout_rule, free_cost)
declare(aten.sym_size.int, extent_rule, free_cost)
declare(aten.contiguous.default, identity_rule, free_cost)
declare(aten.alias.default, identity_rule, free_cost)
declare(aten.clone.default, identity_rule, streaming_cost)

SPECS[operator.getitem] = OpSpec(
    name="getitem",
    target=operator.getitem,
    rule=item_rule,
    cost=free_cost,
    reference=operator.getitem,
    argument_names=("a", "b"),
    takes_roles=True,
)
