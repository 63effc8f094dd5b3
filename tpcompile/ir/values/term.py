"""Terms: the expression of one element of a value, hash-consed, in one normal form.

A value `[T, 64]` is the term of its element `(i, j)`, so views, transposes, slices, splits and
selections of rows change indices, and are not ops:

    const       a number
    element     one op on elements: `add`, `silu`, a cast; each rounds to its dtype
    over        an op over whole axes, which its operands bind: a linear, a mean, a softmax
    read        an element of a checkpoint tensor, an input, or a result of a call
    cases       pieces along one axis, as a concatenation has
    picked      pieces along a computed index
    call        an op on whole values: attention, or any op without a rule
    whole       an operand of a call: the term of its elements, and its extents

Equal terms are the same object, so equal layers share their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from tpcompile.ir.values.change import Change, replaced
from tpcompile.ir.values.index import (
    BOUND,
    COORDINATE,
    Index,
    Name,
    shifted,
    variable,
)
from tpcompile.ir.values.node import (
    CAST,
    COMMUTATIVE,
    Dim,
    Term,
    free_of,
    is_exact,
    parts_of,
    unwidened,
)
from tpcompile.ir.values.orders import INNERMOST, Orders
from tpcompile.ir.values.rebuild import rebuilt


@dataclass(eq=False)
class Terms:
    """The table of terms: constructors, which normalise, and changes of indices."""

    changes_at: dict[Any, Change] = field(default_factory=dict)
    """The changes that read an element of a value, by its shape and the index per axis."""
    _known: dict[Any, Term] = field(default_factory=dict)
    _changes: dict[Any, Change] = field(default_factory=dict)
    _orders: Orders = field(default_factory=Orders)
    _nested: int = 0
    """The number of replacements within each other."""

    def _term(
        self,
        kind: str,
        head: Any,
        args: tuple[Term, ...] = (),
        indices: tuple[Index, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Term:
        key = (kind, head, args, indices, dtype)
        term = self._known.get(key)
        if term is None:
            free = free_of(kind, head, args, indices)
            term = Term(len(self._known), kind, head, args, indices, dtype, free)
            self._known[key] = term
        return term

    def const(self, value: float) -> Term:
        """Return a number; 1 and 1.0 are the same."""
        return self._term("const", float(value))

    def zero(self, dtype: torch.dtype) -> Term:
        """Return the number with which a parameter is padded."""
        return self._term("const", 0.0, dtype=dtype)

    def source(self, kind: str, head: Any, dtype: torch.dtype) -> Term:
        """Return a checkpoint tensor or an input, to be read."""
        return self._term(kind, head, dtype=dtype)

    def call(self, head: Any, args: Iterable[Term], dtype: torch.dtype | None = None) -> Term:
        """Return an op on whole values, to be read."""
        return self._term("call", head, tuple(args), dtype=dtype)

    def whole(self, shape: Sequence[Dim], body: Term) -> Term:
        """Return a whole value as an operand of a call."""
        extents = tuple(extent if isinstance(extent, int) else 0 for extent in shape)
        if body.kind == "read" and body.args[0].kind == "call":
            axes = [extent for extent in extents if extent != 1]
            same = tuple(variable(COORDINATE, n, extent) for n, extent in enumerate(axes))
            if body.indices == same:
                return self._term("whole", (body.head, extents), body.args, dtype=body.dtype)
        return self._term("whole", extents, (body,), dtype=body.dtype)

    def read(
        self,
        source: Term,
        indices: tuple[Index, ...],
        item: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Term:
        """Return an element of a source; `item` is the place of the result of a call."""
        return self._term("read", item, (source,), indices, dtype or source.dtype)

    def element(self, head: Any, args: Sequence[Term], dtype: torch.dtype) -> Term:
        """Return an op on elements, whose result has this dtype."""
        for arg in args:
            if arg.kind == "cases":
                return self._in_cases(
                    arg, args, (), 0, lambda parts, _: self.element(head, parts, dtype)
                )
        operands = [unwidened(arg, dtype) for arg in args]
        if head == "neg" and operands[0].dtype not in (None, dtype):
            (operand,) = operands  # a negation rounds nothing, so the cast may be made after it
            assert operand.dtype is not None
            return self.cast(self.element(head, [operand], operand.dtype), dtype)
        if head in COMMUTATIVE:
            operands.sort(key=_NUMBER)
        if head == "mul":
            for factor, other in (operands, operands[::-1]):
                if factor.kind == "const" and factor.head == 1 and other.dtype == dtype:
                    return other  # a product with 1 is exact
        return self._term("element", head, tuple(operands), dtype=dtype)

    def cast(self, term: Term, dtype: torch.dtype) -> Term:
        """Return a term in another dtype."""
        if term.dtype == dtype:
            return term
        inner = term.args[0] if term.kind == "element" and term.head == CAST else term
        if inner is not term and is_exact(inner.dtype, term.dtype):
            return self.cast(inner, dtype)
        once = term.kind == "element" and term.head in _ROUNDED_ONCE
        if once and is_exact(dtype, term.dtype) and all(arg.dtype == dtype for arg in term.args):
            return self.element(term.head, term.args, dtype)
        return self.element(CAST, [term], dtype)

    def over(
        self,
        head: Any,
        extents: tuple[int, ...],
        args: Sequence[Term],
        dtype: torch.dtype,
        indices: tuple[Index, ...] = (),
    ) -> Term:
        """Return an op over axes that its operands bind; `indices` choose among its results."""
        count = len(extents)
        for arg in args:
            if arg.kind == "cases" and (arg.head[0][0] != BOUND or arg.head[0][1] >= count):
                return self._in_cases(
                    *(arg, args, indices, count),
                    lambda parts, moved: self.over(head, extents, parts, dtype, moved),
                )
        operands = [unwidened(arg, dtype) for arg in args]
        if head in _IN_ANY_ORDER:
            operands = self._in_order(operands)
        return self._term("over", (head, extents), tuple(operands), indices, dtype)

    def _in_order(self, args: list[Term]) -> list[Term]:
        """Return the addends of an op in the order in which its operands are stored.

        Sums of real numbers do not depend on the order of their terms.
        """
        inverse = next(filter(None, map(self._orders.of, args)), None)
        if inverse is None:
            return args
        change = self.change({INNERMOST: inverse})
        return [self.replace(arg, change) for arg in args]

    def _in_cases(
        self,
        cases: Term,
        args: Sequence[Term],
        indices: tuple[Index, ...],
        binders: int,
        build: Callable[[Sequence[Term], tuple[Index, ...]], Term],
    ) -> Term:
        """Move an op into the pieces of one of its operands, which is within its binders."""
        (kind, place), extents = cases.head
        outer = place - binders if kind == BOUND else place
        pieces, offset = [], 0
        for extent in extents:
            inside, outside = (
                self.change({(kind, name): shifted(variable(kind, name, extent), offset)})
                for name in (place, outer)
            )
            parts = [self.replace(arg, inside) for arg in args]
            pieces.append(build(parts, self.moved(indices, outside, 0)))
            offset += extent
        return self.cases((kind, outer), extents, pieces)

    def cases(self, name: Name, extents: Sequence[int], pieces: Sequence[Term]) -> Term:
        """Return pieces along an axis; each is the term of an element by its place in the piece."""
        flat: list[tuple[int, Term]] = []
        for extent, piece in zip(extents, pieces, strict=True):
            parts = [(extent, piece)] if extent else []
            if piece.kind == "cases" and piece.head[0] == name:
                parts = [*zip(piece.head[1], piece.args, strict=True)]
            for part in parts:
                whole = self._continued(name, flat[-1], part) if flat else None
                if whole is None:
                    flat.append(part)
                else:
                    flat[-1] = (flat[-1][0] + part[0], whole)
        if len(flat) == 1:
            return flat[0][1]
        sizes = tuple(extent for extent, _ in flat)
        terms = tuple(piece for _, piece in flat)
        return self._term("cases", (name, sizes), terms, dtype=terms[0].dtype)

    def _continued(self, name: Name, low: tuple[int, Term], high: tuple[int, Term]) -> Term | None:
        """Return a piece that also holds for the next piece of an axis, or None."""
        (first, piece), (second, following) = low, high
        if piece.kind != following.kind or piece.head != following.head:
            return None
        whole = self.replace(piece, self.change({name: variable(*name, first + second)}))
        for place, part in (
            (variable(*name, first), piece),
            (shifted(variable(*name, second), first), following),
        ):
            if self.replace(whole, self.change({name: place})) is not part:
                return None
        return whole

    def change(self, replacements: Mapping[Name, Index], shift: int = 0) -> Change:
        key = shift, frozenset(replacements.items())
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = Change(dict(replacements), shift)
        return change

    def replace(self, term: Term, change: Change, depth: int = 0) -> Term:
        """Replace variables of a term by indices."""
        if not change.touches(term, depth):
            return term
        done = change.done(depth)
        new = done.get(term)
        if new is not None:
            return new
        if self._nested == _NESTED:
            self._replace_parts(term, change, depth)
        self._nested += 1
        new = done[term] = rebuilt(self, term, change, depth)
        self._nested -= 1
        return new

    def _replace_parts(self, term: Term, change: Change, depth: int) -> None:
        """Replace the parts of a term first, with a stack: terms are as deep as a model."""
        stack = [(term, depth)]
        while stack:
            current, level = stack[-1]
            done = change.done(level)
            left = [
                (part, within)
                for part, within in parts_of(current, level)
                if change.touches(part, within) and part not in change.done(within)
            ]
            if left:
                stack += left
                continue
            stack.pop()
            if stack and current not in done:
                done[current] = rebuilt(self, current, change, level)

    def moved(self, indices: tuple[Index, ...], change: Change, depth: int) -> tuple[Index, ...]:
        if not indices:
            return indices
        known = change.moved(depth)
        moved = known.get(indices)
        if moved is None:
            replacements, shift = change.under(depth), change.shift
            compute = partial(self.replace, change=change, depth=depth)
            parts = [replaced(index, replacements, compute, depth, shift) for index in indices]
            moved = known[indices] = tuple(parts)
        return moved

    def picked(self, place: Index, extents: tuple[int, ...], pieces: Sequence[Term]) -> Term:
        """Return pieces along an index that reaches several; a cast of all of them is made last."""
        dtype = pieces[0].dtype
        assert dtype is not None
        narrow = [unwidened(piece, dtype) for piece in pieces]
        whole = narrow if len({piece.dtype for piece in narrow}) == 1 else pieces
        picked = self._term("picked", extents, tuple(whole), (place,), whole[0].dtype)
        return self.cast(picked, dtype)


_NESTED = 100
"""The depth of recursion from which on a stack is used."""
_IN_ANY_ORDER = ("mean", "sum", "linear")
_ROUNDED_ONCE = ("add", "sub", "mul", "div")
"""Ops that torch computes in fp32 for operands of 16 bits, too, and then rounds."""
_NUMBER = attrgetter("number")
