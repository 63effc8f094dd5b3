"""The type of a value: shape, dtype and placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.format import Format
from tpcompile.ir.layout import AnyLayout, FusedLayout, Interval, Layout, TokenLayout
from tpcompile.ir.roles import Role

Dim = int | str
"""An extent: a number, or the name of a symbolic one, such as `T` for the tokens."""


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value, bitwise identical."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Shard:
    """Each rank holds the part of dimension `dim` that the layout assigns to it."""

    dim: int
    layout: AnyLayout

    def __str__(self) -> str:
        return f"Shard({self.dim}, {self.layout})"


@dataclass(frozen=True)
class Partial:
    """Each rank holds a term; the value is their sum."""

    disjoint: bool = False
    """Whether at most one term of each element is not zero, so that adding them rounds nothing."""

    def __str__(self) -> str:
        return "Partial(disjoint)" if self.disjoint else "Partial(sum)"


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()
PARTIAL = Partial()
DISJOINT = Partial(disjoint=True)


def _known(extent: Dim) -> int:
    assert isinstance(extent, int)
    return extent


@dataclass(frozen=True)
class ValueType:
    """Global shape, dtype, placement across the ranks, and the role if the value has one.

    A parameter or a KV cache may also have a format. Then `dtype` is that of the values that it
    stands for.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    placement: Placement = REPLICATE
    role: Role | None = None
    format: Format | None = None
    """None for a value, and for a parameter or a KV cache that is stored as its values."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype, self.placement, self.role, self.format))

    def __hash__(self) -> int:
        return self._hash

    @property
    def stored(self) -> Format:
        """The format of a parameter, also if it is that of the dtype."""
        return Format.of(self.dtype) if self.format is None else self.format

    @property
    def dims(self) -> int:
        return len(self.shape)

    def placed(self, placement: Placement) -> ValueType:
        return replace(self, placement=placement)

    def in_role(self, role: Role | None) -> ValueType:
        return replace(self, role=role)

    def sharded(self, dim: int, layout: AnyLayout) -> ValueType:
        return self.placed(Shard(dim % self.dims, layout))

    def layout_of(self, dim: int) -> AnyLayout | None:
        """Return the layout along `dim`, or None if every rank holds all of it."""
        if isinstance(self.placement, Shard) and self.placement.dim == dim % self.dims:
            return self.placement.layout
        return None

    def local_shape(self, rank: int) -> tuple[Dim, ...]:
        shape = list(self.shape)
        if isinstance(self.placement, Shard):
            layout = self.placement.layout
            if isinstance(layout, Layout | FusedLayout):
                shape[self.placement.dim] = layout.extent(rank)
            else:
                shape[self.placement.dim] = f"{layout.symbol}/{layout.ranks}"
        return tuple(shape)

    def extent(self, dim: int) -> int:
        """Return the extent of a dimension that is not symbolic."""
        return _known(self.shape[dim])

    def local_extent(self, rank: int, dim: int) -> int:
        """Return the extent of a rank's part along a dimension that is not symbolic."""
        return _known(self.local_shape(rank)[dim])

    def columns(self, rank: int) -> Interval:
        """Return the columns of a rank's rows, which are one run of the whole weight's columns."""
        layout = self.layout_of(-1)
        first = layout.intervals(rank)[0][0] if isinstance(layout, Layout) else 0
        return first, first + self.local_extent(rank, -1)

    def refusal(self) -> str | None:
        """Return why the type is invalid, or None."""
        if not isinstance(self.placement, Shard):
            return None
        dim, layout = self.placement.dim, self.placement.layout
        if not 0 <= dim < self.dims:
            return f"dimension {dim} of a value with {self.dims} dimensions"
        if isinstance(layout, TokenLayout):
            return None if self.shape[dim] == layout.symbol else f"dim {dim} is not the token axis"
        if layout.size != self.shape[dim]:
            return f"layout {layout} spans {layout.size}, dimension {dim} spans {self.shape[dim]}"
        return layout.refusal()

    def __str__(self) -> str:
        extents = ", ".join(str(extent) for extent in self.shape)
        return f"{dtype_name(self.dtype)}[{extents}] {self.placed_as}"

    @property
    def placed_as(self) -> str:
        """The placement as text, followed by the format and the role, if any."""
        return self.described(str(self.placement))

    def described(self, placement: str) -> str:
        """Append the format and the role, if any, to this text of the placement."""
        stored = "" if self.format is None else f" as {self.format}"
        return f"{placement}{stored}" + ("" if self.role is None else f" {self.role}")


@dataclass(frozen=True)
class SymbolType:
    """An integer known only at run time: the extent named `symbol`."""

    symbol: str

    def __str__(self) -> str:
        return f"int {self.symbol}"


AnyType = ValueType | SymbolType | tuple[ValueType, ...]
