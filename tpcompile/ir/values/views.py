"""Rules of the values of ops that change only indices: views, slices, splits and their like."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tpcompile.ir.values.node import Dim
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import (
    OpaqueError,
    Value,
    expanded,
    extent_of,
    joined,
    product,
    repeated,
    reshaped,
    selected,
    sliced,
    stacked,
    transposed,
)


def view(scope: Scope, self: Value, size: Sequence[Any] = (), shape: Any = None) -> Value:
    """Return the value of a view or a reshape, which may leave one extent open."""
    wanted = list(shape or size)
    total, symbols = product(self.shape, range(self.dims))
    if -1 in wanted:
        place = wanted.index(-1)
        known_axes = [axis for axis in range(len(wanted)) if axis != place]
        known, named = product(wanted, known_axes)
        left = [symbol for symbol in symbols if symbol not in named]
        factor = total // known
        wanted[place] = factor if not left else left[0] if factor == 1 else f"{factor}*{left[0]}"
    return reshaped(scope.terms, self, wanted)


def transpose(scope: Scope, self: Value, dim0: int, dim1: int) -> Value:
    return transposed(scope.terms, self, dim0 % self.dims, dim1 % self.dims)


def unsqueeze(scope: Scope, self: Value, dim: int) -> Value:
    dim %= self.dims + 1
    return reshaped(scope.terms, self, (*self.shape[:dim], 1, *self.shape[dim:]))


def squeeze(scope: Scope, self: Value, dim: int) -> Value:
    dim %= self.dims
    return reshaped(scope.terms, self, (*self.shape[:dim], *self.shape[dim + 1 :]))


def expand(scope: Scope, self: Value, size: Sequence[Any], implicit: bool = False) -> Value:
    shape = [old if new == -1 else new for new, old in zip(size, self.shape, strict=True)]
    return expanded(scope.terms, self, shape)


def unflatten(scope: Scope, self: Value, dim: int, sizes: Sequence[int]) -> Value:
    dim %= self.dims
    parts = list(sizes)
    if -1 in parts:
        known, _ = product(parts, [n for n, size in enumerate(parts) if size != -1])
        parts[parts.index(-1)] = extent_of(self.shape[dim]) // known
    return reshaped(scope.terms, self, (*self.shape[:dim], *parts, *self.shape[dim + 1 :]))


def flatten(scope: Scope, self: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    start, end = start_dim % self.dims, end_dim % self.dims
    total, symbols = product(self.shape, range(start, end + 1))
    if symbols:
        raise OpaqueError("an extent that is merged is not known")
    return reshaped(scope.terms, self, (*self.shape[:start], total, *self.shape[end + 1 :]))


def repeat(
    scope: Scope, self: Value, repeats: int, dim: int | None = None, output_size: Any = None
) -> Value:
    if dim is None:
        raise OpaqueError("a repetition of all elements")
    return repeated(scope.terms, self, repeats, dim)


def select(scope: Scope, self: Value, dim: int, index: int) -> Value:
    dim %= self.dims
    extent = extent_of(self.shape[dim])
    if index < 0 and not extent:
        raise OpaqueError("the extent is not known")
    row = sliced(scope.terms, self, dim, index % extent if extent else index, 1)
    return squeeze(scope, row, dim)


def slice_of(
    scope: Scope, self: Value, dim: int, start: int | None, end: int | None, step: int
) -> Value:
    extent = self.shape[dim % self.dims]
    if isinstance(extent, str):
        return self  # its type rule refuses a part of an extent that is not known
    first, stop, step = slice(start, end, step).indices(extent)
    return sliced(scope.terms, self, dim, first, len(range(first, stop, step)), step)


def concatenation(scope: Scope, tensors: Sequence[Value], dim: int = 0) -> Value:
    return joined(scope.terms, tensors, dim)


def stack(scope: Scope, tensors: Sequence[Value], dim: int = 0) -> Value:
    return stacked(scope.terms, tensors, dim)


def split(scope: Scope, self: Value, split_sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    starts = accumulate(split_sizes, initial=0)
    return tuple(
        sliced(scope.terms, self, dim, start, size)
        for start, size in zip(starts, split_sizes, strict=False)
    )


def chunk(scope: Scope, self: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    extent = extent_of(self.shape[dim % self.dims])
    size = -(-extent // chunks)
    return split(scope, self, [min(size, extent - start) for start in range(0, extent, size)], dim)


def index_select(scope: Scope, self: Value, dim: int, index: Value) -> Value:
    return selected(scope.terms, self, dim, index)


def index(scope: Scope, self: Value, indices: Sequence[Value | None]) -> Value:
    ((dim, rows),) = ((n, rows) for n, rows in enumerate(indices) if rows is not None)
    return selected(scope.terms, self, dim, rows)


def rows_of(scope: Scope, weight: Value, ids: Value) -> Value:
    """Return the rows of a table: the value of an embedding."""
    return selected(scope.terms, weight, 0, ids)


def extent(scope: Scope, self: Value, dim: int) -> Dim:
    return self.shape[dim]


def item(scope: Scope, a: Sequence[Value], b: int) -> Value:
    return a[b]
