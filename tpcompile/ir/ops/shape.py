"""ATen shape ops (views, transposes, heads), no-ops such as `contiguous`, and `getitem`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.ir.layout import Layout
from tpcompile.ir.ops.head_order import role_of_heads
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
from tpcompile.ir.types import REPLICATE, AnyType, Dim, Shard, SymbolType, ValueType

aten = torch.ops.aten


def unsharded(kind: ValueType, dim: int, doing: str) -> None:
    if kind.layout_of(dim) is not None:
        refuse("whole-axis", kind, f"dimension {dim} whole on every rank, to {doing} it")


def shifted(kind: ValueType, shape: Sequence[Dim], moved: int) -> ValueType:
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
    return shifted(self, (*self.shape[:dim], 1, *self.shape[dim:]), int(behind))


def unflatten_rule(self: ValueType, dim: int, sizes: tuple[int, ...]) -> ValueType:
    dim = dim_of(self, dim)
    extent = self.shape[dim]
    require(len(sizes) == 2 and sizes[0] == -1, "unflatten", sizes, "[-1, width]")
    width = sizes[1]
    require(
        isinstance(extent, int) and width > 0 and extent % width == 0,
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
        return shifted(self, shape, int(behind)).in_role(role)
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
    unsharded(self, end, "flatten")
    shape = (*self.shape[:start], outer * inner, *self.shape[end + 1 :])
    layout = self.layout_of(start)
    if layout is None:
        behind = isinstance(self.placement, Shard) and self.placement.dim > end
        return shifted(self, shape, -int(behind))
    require(isinstance(layout, Layout), "flatten", self, "one logical axis")
    assert isinstance(layout, Layout)
    return ValueType(shape, self.dtype, Shard(start, layout.with_grain(layout.grain * inner)))


def extent_rule(self: ValueType, dim: int) -> SymbolType:
    dim = dim_of(self, dim)
    unsharded(self, dim, "measure")
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
declare(aten.unflatten.int, unflatten_rule, free_cost, takes_roles=True)
declare(aten.flatten.using_ints, flatten_rule, free_cost)
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
