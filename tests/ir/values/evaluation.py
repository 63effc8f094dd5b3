"""Numbers of expressions, computed from their meaning alone: an element at a time, vectorised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.values.index import BOUND, COMPUTED, COORDINATE, Index, Inexact, Name
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.value import Value

Grid = dict[Name, torch.Tensor]
"""The values of index variables, each along an axis of its own, or equal along an axis."""

_ELEMENTS: dict[Any, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "bias": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "pow": torch.pow,
    "rsqrt": torch.rsqrt,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "square": torch.square,
    ("gelu", ("approximate", "none")): functional.gelu,
    ("gelu", ("approximate", "tanh")): lambda x: functional.gelu(x, approximate="tanh"),
    "to": lambda x: x,
    ("softplus", ("beta", 1), ("threshold", 20)): functional.softplus,
}


@dataclass(frozen=True)
class Numbers:
    """What expressions read: tensors and inputs by name, and calls by the names of ops."""

    tensors: Callable[[str], torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    calls: Mapping[str, Callable[..., Any]]
    tokens: int
    _known: dict[Any, Any] = field(default_factory=dict)
    """The results of calls, the elements of terms on a grid, and the grids."""

    def of(self, value: Value) -> torch.Tensor:
        """Return the elements of a value."""
        shape = [self.extent(extent) for extent in value.shape]
        axes = [extent for extent in shape if extent != 1]
        grid = self._known.setdefault(("grid", *axes), _grid(axes))
        elements = self._term(value.body, grid)
        return elements.broadcast_to(axes).reshape(shape).to(value.dtype)

    def extent(self, extent: int | str) -> int:
        return extent if isinstance(extent, int) and extent else self.tokens

    def _term(self, term: Term, grid: Grid) -> torch.Tensor:
        grid_key = tuple(sorted((name, id(grid[name])) for name in term.free))
        if (term, grid_key) not in self._known:
            self._known[term, grid_key] = self._element(term, grid)
        elements: torch.Tensor = self._known[term, grid_key]
        return elements

    def _element(self, term: Term, grid: Grid) -> torch.Tensor:
        match term.kind:
            case "const":
                return torch.tensor(term.head)
            case "element":
                args = [self._term(arg, grid) for arg in term.args]
                dtype = term.dtype or torch.float32
                wide = [arg.to(torch.promote_types(dtype, torch.float32)) for arg in args]
                return _ELEMENTS[term.head](*wide).to(dtype)
            case "read":
                source = self._source(term.args[0], term.head)
                places = [self._index(index, grid) for index in term.indices]
                if len(places) < source.dim():
                    source = source.squeeze()  # axes with one element have no index
                return source[tuple(places)] if places else source
            case "over":
                return self._over(term, grid)
            case "cases":
                return self._cases(term, grid)
            case "picked":
                return self._picked(term, grid)
        raise AssertionError(term.kind)

    def _index(self, index: Index, grid: Grid) -> torch.Tensor:
        total = torch.tensor(index.constant)
        for factor, (kind, name, _), divisor, modulus in index.digits:
            if kind != COMPUTED:
                number = grid[kind, name]
            elif isinstance(name, Inexact):
                inner = self._index(name.dividend, grid)
                number = inner % name.divisor if name.remainder else inner // name.divisor
            else:
                number = self._term(name, grid)
            number = number // divisor
            total = total + factor * (number % modulus if modulus else number)
        return total

    def _over(self, term: Term, grid: Grid) -> torch.Tensor:
        head, (extent,) = term.head
        inner = self._within(grid, extent)
        args = [self._term(arg, inner) for arg in term.args]
        if head == "linear":
            return (args[0].float() * args[1].float()).sum(-1).to(term.dtype)
        (row,) = args
        if head == "argmax":
            return row.argmax(-1)
        if head in ("mean", "sum"):
            return getattr(torch, head)(row.to(term.dtype), -1)
        (place,) = (self._index(index, grid) for index in term.indices)
        if head == "softmax":
            whole = torch.softmax(row.to(term.dtype), -1)
        else:
            kind, count, largest, ordered, part = head
            assert kind == "topk"
            whole = getattr(torch.topk(row, count, -1, largest, ordered), part)
        place = place.unsqueeze(-1)
        shape = torch.broadcast_shapes(whole.shape[:-1], place.shape[:-1])
        chosen = whole.expand(*shape, whole.shape[-1]).gather(-1, place.expand(*shape, 1))
        return chosen.squeeze(-1)

    def _within(self, grid: Grid, extent: int) -> Grid:
        """Return a grid with a further axis, which an op binds."""
        key = ("grid", extent, tuple((name, id(places)) for name, places in grid.items()))
        if key not in self._known:
            inner = {
                (kind, name + 1 if kind == BOUND else name): places.unsqueeze(-1)
                for (kind, name), places in grid.items()
            }
            axes = max((places.dim() for places in inner.values()), default=1)
            inner[BOUND, 0] = torch.arange(extent).reshape([1] * (axes - 1) + [extent])
            self._known[key] = inner
        inner_grid: Grid = self._known[key]
        return inner_grid

    def _piece(self, place: torch.Tensor, start: int, extent: int) -> torch.Tensor:
        """Return places within a piece; those outside it are not used."""
        key = ("piece", id(place), start, extent)
        if key not in self._known:
            self._known[key] = (place - start).clamp(0, extent - 1)
        places: torch.Tensor = self._known[key]
        return places

    def _cases(self, term: Term, grid: Grid) -> torch.Tensor:
        name, extents = term.head
        place, start = grid[name], 0
        merged: torch.Tensor | None = None
        for extent, piece in zip(extents, term.args, strict=True):
            inside = (place >= start) & (place < start + extent)
            values = self._term(piece, {**grid, name: self._piece(place, start, extent)})
            merged = values if merged is None else torch.where(inside, values, merged)
            start += extent
        assert merged is not None
        return merged

    def _picked(self, term: Term, grid: Grid) -> torch.Tensor:
        """Return elements of pieces, each of which binds the place within it."""
        place, start = self._index(term.indices[0], grid), 0
        merged: torch.Tensor | None = None
        for extent, piece in zip(term.head, term.args, strict=True):
            inner = {(k, n + 1 if k == BOUND else n): places for (k, n), places in grid.items()}
            inner[BOUND, 0] = self._piece(place, start, extent)
            values = self._term(piece, inner)
            merged = values if merged is None else torch.where(place >= start, values, merged)
            start += extent
        assert merged is not None
        return merged

    def _source(self, source: Term, item: int) -> torch.Tensor:
        if source.kind == "tensor":
            return self.tensors(source.head[0]).to(source.dtype)
        if source.kind == "input":
            return self.inputs[source.head[0]]
        if source not in self._known:
            self._known[source] = self._called(source)
        results = self._known[source]
        return results[item] if isinstance(results, tuple) else results

    def _called(self, call: Term) -> Any:
        name, *arguments = call.head
        left = list(call.args)
        bound = {
            key: self._whole(left.pop(0)) if argument == "value" else argument[1]
            for key, argument in arguments
        }
        return self.calls[name](**bound)

    def _whole(self, operand: Term) -> torch.Tensor:
        (body,) = operand.args
        if body.kind == "call":
            item, _ = operand.head
            return self._source(body, item)
        shape = [self.extent(extent) for extent in operand.head]
        if body.kind == "read" and body.args[0].kind == "input":
            whole = self.inputs[body.args[0].head[0]]
            if 0 in operand.head or list(whole.shape) == shape:
                return whole
        axes = [extent for extent in shape if extent != 1]
        grid = self._known.setdefault(("grid", *axes), _grid(axes))
        return self._term(body, grid).broadcast_to(axes).reshape(shape).contiguous()


def _grid(axes: list[int]) -> Grid:
    """Return the indices of each axis, along an axis of their own."""
    return {
        (COORDINATE, n): torch.arange(extent).reshape([-1] + [1] * (len(axes) - n - 1))
        for n, extent in enumerate(axes)
    }
