"""Expressions as text, and the smallest difference between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.values.index import BOUND, COMPUTED, Digit, Index, Inexact
from tpcompile.ir.values.named import Naming, paired
from tpcompile.ir.values.node import CAST, COMMUTATIVE, Term

_AXES = "ijlmnpq"
_SIGNS = {"add": "+", "mul": "·", "sub": "-", "div": "/"}


_LONG = 320
"""The number of characters above which an expression is abbreviated."""


class _Style(NamedTuple):
    """The depth to which a term is shown, the names of its values, and terms to show always."""

    depth: int
    naming: Naming
    path: frozenset[Term]

    def deeper(self) -> _Style:
        return self._replace(depth=self.depth - 1)


def shown(
    term: Term,
    depth: int = 4,
    naming: Naming = lambda term: None,
    path: frozenset[Term] = frozenset(),
) -> str:
    """Return an expression as text, with values by name, and `…` for deeper terms.

    The terms of a path, such as that to a difference, are shown at any depth.
    """
    return _bare(term, _shown(term, _Style(depth, naming, path)))


def shown_short(
    terms: Sequence[Term], naming: Naming, path: Iterable[Sequence[Term]] = ()
) -> tuple[str, ...]:
    """Return expressions as text, as deep as fits into a message."""
    always = frozenset(term for pair in path for term in pair)
    texts: tuple[str, ...] = ()
    for depth in (6, 4, 3, 2, 1):
        texts = tuple(shown(term, depth, naming, always) for term in terms)
        if max(map(len, texts)) <= _LONG:
            break
    return texts


def shown_difference(before: Term, after: Term, naming: Naming) -> tuple[str, str]:
    """Return two terms as text; if calls differ only in numbers, show only these.

    Terms that differ in their dtypes alone are shown with them.
    """
    terms = before, after
    if before.kind == after.kind == "call" and before.args == after.args:
        numbers = [_numbers(term.head) for term in terms]
        old, new = (
            ", ".join(f"{key}={value}" for key, value in pairs if (key, value) not in other_pairs)
            for pairs, other_pairs in (numbers, numbers[::-1])
        )
        if old and new:
            return old, new
    old, new = shown_short(terms, naming)
    if old == new and before.dtype is not None and after.dtype is not None:
        old, new = (f"{old} in {dtype_name(dtype)}" for dtype in (before.dtype, after.dtype))
    return old, new


def _shown(term: Term, style: _Style) -> str:
    match term.kind:
        case "const":
            return f"{term.head:g}"
        case "tensor":
            return str(term.head[0])
        case "input":
            return f"%{term.head[0]}"
    named = None if term in style.path else style.naming(term)
    if named is not None:
        return f"%{named[0]}{_places(named[1], style)}"
    if term.kind == "read":
        item = f".{term.head}" if term.head else ""
        return f"{_shown(term.args[0], style)}{item}{_places(term.indices, style)}"
    if style.depth <= 0 and term not in style.path:
        return f"{_name(term.head)}(…)" if term.kind == "call" else "…"
    inner = [_shown(arg, style.deeper()) for arg in term.args]
    if term.head not in _SIGNS:
        inner = list(map(_bare, term.args, inner))
    return _FORMS[term.kind](term, inner, style)


def _bare(term: Term, text: str) -> str:
    """Drop the parentheses of a sum or product that stands alone."""
    return text[1:-1] if term.kind == "element" and text.startswith("(") else text


def _element(term: Term, inner: list[str], style: _Style) -> str:
    if term.head == CAST and term.dtype is not None:
        return f"to({inner[0]}, {dtype_name(term.dtype)})"
    if term.head == "bias":
        return f"biased({', '.join(inner)})"
    if term.head in COMMUTATIVE:
        inner = sorted(inner)  # an order that does not depend on when terms were made
    if term.head in _SIGNS:
        return "(" + f" {_SIGNS[term.head]} ".join(inner) + ")"
    return f"{_name(term.head)}({', '.join(inner)})"


def _cases(term: Term, inner: list[str], style: _Style) -> str:
    (kind, place), extents = term.head
    sizes = ", ".join(map(str, extents))
    return f"cat({', '.join(inner)}; {_variable(kind, place)} in {sizes})"


def _call(term: Term, inner: list[str], style: _Style) -> str:
    numbers = [f"{key}={value}" for key, value in _numbers(term.head)]
    return f"{_name(term.head)}({', '.join([*inner, *numbers])})"


def _over(term: Term, inner: list[str], style: _Style) -> str:
    return f"{_name(term.head[0])}({', '.join(inner)}){_places(term.indices, style)}"


def _picked(term: Term, inner: list[str], style: _Style) -> str:
    return f"pick({_index(term.indices[0], style)} of {', '.join(inner)})"


_FORMS: dict[str, Callable[[Term, list[str], _Style], str]] = {
    "element": _element,
    "over": _over,
    "cases": _cases,
    "picked": _picked,
    "call": _call,
    "whole": lambda term, inner, style: inner[0],
}


def _places(indices: Sequence[Index], style: _Style) -> str:
    """Return indices in brackets, if there are any."""
    places = ", ".join(_index(index, style) for index in indices)
    return f"[{places}]" if places else ""


def differences(
    before: Term, after: Term, naming: Naming = lambda term: None
) -> list[tuple[Term, Term]]:
    """Return pairs of different sub-expressions at the same place, each within the one before.

    The last pair is the smallest. Within values that are shown by name, there is no smaller one.
    """
    path: list[tuple[Term, Term]] = []
    pair: tuple[Term, Term] | None = (before, after)
    while pair is not None and pair not in path:
        path.append(pair)
        pair = _inner(*pair, naming, is_whole=len(path) == 1)
    return path


def _inner(before: Term, after: Term, naming: Naming, is_whole: bool) -> tuple[Term, Term] | None:
    """Return the different parts of two terms that are alike, or None."""
    if not _alike(before, after) or (not is_whole and naming(before) and naming(after)):
        return None
    pairs = [(old, new) for old, new in _paired_parts(before, after) if old is not new]
    if len(pairs) == 1:
        return pairs[0]
    crossed = _crossed(before, after)
    if len(pairs) == 2 and crossed is not None:
        return crossed
    return next((pair for pair in pairs if _alike(*pair)), None)


def _crossed(before: Term, after: Term) -> tuple[Term, Term] | None:
    """Return the operands in which two commutative ops differ, in any order."""
    if before.kind != "element" or before.head not in COMMUTATIVE:
        return None
    shared = set(before.args) & set(after.args)
    if len(shared) != 1:
        return None
    (old,), (new,) = ([arg for arg in term.args if arg not in shared] for term in (before, after))
    return old, new


def _alike(before: Term, after: Term) -> bool:
    """Return whether two terms differ only in their parts."""
    return (
        (before.kind, before.head, before.dtype) == (after.kind, after.head, after.dtype)
        and len(before.args) == len(after.args)
        and len(_numbers_of(before)) == len(_numbers_of(after))
        and _fixed(before) == _fixed(after)
    )


def _paired_parts(before: Term, after: Term) -> list[tuple[Term, Term]]:
    """Pair the terms of which two terms consist, also within their indices."""
    pairs = zip(_numbers_of(before), _numbers_of(after), strict=True)
    return [*paired(before, after), *pairs]


def _numbers_of(term: Term) -> list[Term]:
    return [part for index in term.indices for part in _computed(index)]


def _computed(index: Index) -> list[Term]:
    terms: list[Term] = []
    for digit in index.digits:
        name = digit.variable.name
        if digit.variable.kind == COMPUTED:
            terms += _computed(name.dividend) if isinstance(name, Inexact) else [name]
    return terms


def _fixed(term: Term) -> Any:
    """Return the indices of a term without the terms in them."""
    return tuple(
        (
            index.constant,
            *((d.coefficient, d.divisor, d.modulus, _named(d.variable)) for d in index.digits),
        )
        for index in term.indices
    )


def _named(variable: Any) -> Any:
    kind, name, extent = variable
    return (kind, None if kind == COMPUTED else name, extent)


def _index(index: Index, style: _Style) -> str:
    words = [_digit(digit, style) for digit in index.digits]
    if index.constant or not words:
        words.append(str(index.constant))
    return " + ".join(words)


def _digit(digit: Digit, style: _Style) -> str:
    factor, (kind, name, extent), divisor, modulus = digit
    if kind != COMPUTED:
        word = _variable(kind, name)
    elif isinstance(name, Inexact):
        word = f"({_index(name.dividend, style)}){'%' if name.remainder else '/'}{name.divisor}"
    else:
        word = _shown(name, style.deeper())
    if divisor != 1:
        word += f"/{divisor}"
    if modulus and modulus != -(-extent // divisor):
        word += f"%{modulus}"
    if factor == 1:
        return word
    return f"{factor}{word}" if word.isalnum() else f"{factor}·({word})"


def _variable(kind: int, name: Any) -> str:
    return f"k{name or ''}" if kind == BOUND else _AXES[name] if name < len(_AXES) else f"i{name}"


def _name(head: Any) -> str:
    first = head[0] if isinstance(head, tuple) else head
    return str(first).rpartition(".")[2] if str(first).startswith(("tpc.", "aten.")) else str(first)


def _numbers(head: Any) -> list[tuple[str, Any]]:
    """Return the arguments of a call that are not values."""
    if not isinstance(head, tuple):
        return []
    return [
        (part[0], part[1][1])
        for part in head[1:]
        if isinstance(part, tuple)
        and len(part) == 2
        and isinstance(part[1], tuple)
        and part[1]
        and len(part[1]) == 2
    ]
