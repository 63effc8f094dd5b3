"""ATen shape ops (views, transposes, heads), no-ops such as `contiguous`, and `getitem`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
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
from tpcompile.ir.values import views
from tpcompile.ir.values.build import unchanged

aten = torch.ops.aten
FLATTEN, UNFLATTEN = aten.flatten.using_ints, aten.unflatten.int


def unsharded(kind: ValueType, dim: int, action: str) -> None:
    if kind.layout_of(dim) is not None:
        refuse("whole-axis", kind, f"dimension {dim} whole on every rank, to {action} it")


def shifted(kind: ValueType, shape: Sequence[Dim], moved: int = 0, after: int = -1) -> ValueType:
    """Return a type with the new shape, in which dimensions after `after` shift by `moved`."""
    placement = kind.placement
    if isinstance(placement, Shard) and placement.dim > after:
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
    # Tokens may be merged with later dimensions, but not disappear in a known extent.
    total, symbols = _elements(self.shape)
    known, named = _elements(extent for extent in wanted if extent != -1)
    left = [symbol for symbol in symbols if symbol not in named]
    require(
        all(symbol in symbols for symbol in named)
        and len(left) <= wanted[:1].count(-1)
        and wanted.count(-1) <= 1,
        "view",
        wanted,
        f"the same symbolic extents as {self}",
    )
    require(
        total % known == 0 and (wanted.count(-1) == 1 or known == total),
        "view",
        wanted,
        f"as many elements as {self}",
    )
    inferred = _product(total // known, left)
    return ValueType(tuple(inferred if extent == -1 else extent for extent in wanted), self.dtype)


def _elements(shape: Iterable[Dim]) -> tuple[int, list[str]]:
    """Return the product of the known extents and of those of the form `8*T`, and the symbols."""
    total, symbols = 1, []
    for extent in shape:
        if isinstance(extent, str):
            factor, _, symbol = extent.rpartition("*")
            symbols.append(symbol)
            extent = int(factor or 1)
        total *= extent
    return total, symbols


def _product(factor: int, symbols: Sequence[str]) -> Dim:
    """Return the extent of an axis of tokens, merged with others as in `8*T`, or a number."""
    if not symbols:
        return factor
    return symbols[0] if factor == 1 else f"{factor}*{symbols[0]}"


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
    return shifted(self, (*self.shape[:dim], 1, *self.shape[dim:]), 1, dim - 1)


def squeeze_rule(self: ValueType, dim: int) -> ValueType:
    dim = dim_of(self, dim)
    require(self.shape[dim] == 1, "squeeze", self, f"an extent of 1 in dimension {dim}")
    return shifted(self, (*self.shape[:dim], *self.shape[dim + 1 :]), -1, dim)


def expand_rule(self: ValueType, size: tuple[Any, ...], implicit: bool = False) -> ValueType:
    require(self.placement == REPLICATE, "expand", self, "a replicated value")
    wanted = [s.symbol if isinstance(s, SymbolType) else s for s in size]
    require(
        len(wanted) == self.dims
        and all(new in (-1, old) or old == 1 for new, old in zip(wanted, self.shape, strict=True)),
        "expand",
        wanted,
        f"the extents of {self}, or others for those of 1",
    )
    shape = (old if new == -1 else new for new, old in zip(wanted, self.shape, strict=True))
    return ValueType(tuple(shape), self.dtype)


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
        return shifted(self, shape, 1, dim).in_role(role)
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
        return shifted(self, shape, -1, end)
    require(isinstance(layout, Layout), "flatten", self, "one logical axis")
    assert isinstance(layout, Layout)
    return ValueType(shape, self.dtype, Shard(start, layout.with_grain(layout.grain * inner)))


def repeat_rule(
    self: ValueType, repeats: int, dim: int | None = None, output_size: int | None = None
) -> ValueType:
    """Type heads or their elements, of which each is repeated; refuse other repetitions."""
    heads = "the heads of [T, heads, width], or their elements, each repeated"
    require(dim is not None and self.dims >= 3, "repeat-heads", self, heads)
    place = dim_of(self, dim if dim is not None else 0)
    extent = self.shape[place]
    require(place >= self.dims - 2, "repeat-heads", f"dimension {dim} of {self}", heads)
    require(self.placement == REPLICATE, "repeat-heads", self, "a replicated value")
    require(isinstance(extent, int) and repeats > 0, "repeat-heads", self, "a known extent")
    assert isinstance(extent, int)
    shape = (*self.shape[:place], extent * repeats, *self.shape[place + 1 :])
    return ValueType(shape, self.dtype)


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


declare(aten.view.default, view_rule, free_cost, value=views.view)
declare(aten.reshape.default, view_rule, free_cost, value=views.view)
declare(aten.transpose.int, transpose_rule, free_cost, value=views.transpose)
declare(aten.unsqueeze.default, unsqueeze_rule, free_cost, value=views.unsqueeze)
declare(aten.squeeze.dim, squeeze_rule, free_cost, value=views.squeeze)
declare(aten.expand.default, expand_rule, free_cost, value=views.expand)
declare(UNFLATTEN, unflatten_rule, free_cost, takes_roles=True, value=views.unflatten)
declare(FLATTEN, flatten_rule, free_cost, value=views.flatten)
declare(aten.repeat_interleave.self_int, repeat_rule, streaming_cost, value=views.repeat)
declare(aten.dropout.default, dropout_rule, free_cost, value=unchanged)
declare(aten.sym_size.int, extent_rule, free_cost, value=views.extent)
declare(aten.contiguous.default, identity_rule, free_cost, value=unchanged)
declare(aten.alias.default, identity_rule, free_cost, value=unchanged)
declare(aten.clone.default, identity_rule, streaming_cost, value=unchanged)

SPECS[operator.getitem] = OpSpec(
    name="getitem",
    target=operator.getitem,
    rule=item_rule,
    cost=free_cost,
    reference=operator.getitem,
    argument_names=("a", "b"),
    value=views.item,
    takes_roles=True,
)
