"""Terms: a rank's values as calls over parameters and inputs. Equal terms are one object.

A term omits roundings of values, and the order of additions in a sum. It contains everything else:
the function, its operands, its numbers, and the order of operands. Smart constructors bring
different ways to write the same value into one form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tpcompile.ir.ops import SPECS
from tpcompile.vm.program.instruction import to_fp32

Shape = tuple[Any, ...]
_MOST_SHOWN = 4
"""The operands of a call that messages list."""
TOKENS = "T"
"""The extent of the dimension of the rows of a step."""


class Term:
    """A function applied to terms and numbers. Compare terms by identity."""

    __slots__ = ("args", "name", "number", "shape")

    def __init__(self, name: str, args: tuple[Any, ...], shape: Shape, number: int) -> None:
        self.name, self.args, self.shape, self.number = name, args, shape, number

    @property
    def operands(self) -> Iterator[Term]:
        """The terms among the arguments."""
        return (arg for arg in self.args if isinstance(arg, Term))

    def __repr__(self) -> str:
        return self.text(2)

    def text(self, depth: int) -> str:
        """Format the term, with calls nested up to a depth."""
        if not self.args:
            return self.name
        if self.name == "weight":
            return str(self.args[0])
        if not depth:
            return f"{self.name}(…)"
        shown = [_text(arg, depth - 1) for arg in self.args[:_MOST_SHOWN]]
        more = ["…"] if len(self.args) > _MOST_SHOWN else []
        return f"{self.name}({', '.join([*shown, *more])})"


def _text(arg: Any, depth: int) -> str:
    if isinstance(arg, Term):
        return arg.text(depth)
    return f"{arg:.6g}" if isinstance(arg, float) else str(arg)


class Terms:
    """The terms of one proof."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}

    def __iter__(self) -> Iterator[Term]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def call(self, name: str, *args: Any, shape: Shape | None = None) -> Term:
        """Return the term of a call. Its shape is by default that of its first operand."""
        args = tuple(map(_plain, args))
        key = (name, *args)
        term = self._known.get(key)
        if term is None:
            if shape is None:
                shape = next((arg.shape for arg in args if isinstance(arg, Term)), ())
            term = self._known[key] = Term(name, args, shape, len(self._known))
        return term

    def columns(self, x: Term, start: int, stop: int) -> Term:
        """Return these columns of a value."""
        if (start, stop) == (0, x.shape[-1]):
            return x
        if x.name == "columns":
            first = x.args[1]
            return self.columns(x.args[0], first + start, first + stop)
        return self.call("columns", x, start, stop, shape=(*x.shape[:-1], stop - start))

    def heads(self, x: Term, width: int) -> Term:
        """Return a value as heads of this width."""
        if x.name == "flat" and x.args[0].shape[-1] == width:
            inner: Term = x.args[0]
            return inner
        *outer, columns = x.shape
        return self.call("heads", x, width, shape=(*outer, columns // width, width))

    def flat(self, x: Term) -> Term:
        """Return heads side by side."""
        if x.name == "heads":
            inner: Term = x.args[0]
            return inner
        *outer, heads, width = x.shape
        return self.call("flat", x, shape=(*outer, heads * width))

    def linear(self, x: Term, weight: Term, bias: Term | None) -> Term:
        """Return a linear."""
        shape = (*x.shape[:-1], weight.shape[0])
        product = self.call("linear", x, weight, shape=shape)
        return product if bias is None else self.total(product, bias)

    def linear_of_columns(self, x: Term, weight: Term, start: int, stop: int) -> Term:
        """Return the sum over these columns of a linear."""
        if (start, stop) == (0, weight.shape[1]):
            return self.linear(x, weight, None)
        shape = (*x.shape[:-1], weight.shape[0])
        return self.call("linear of columns", x, weight, start, stop, shape=shape)

    def total(self, *addends: Term) -> Term:
        """Return a sum. An addend that occurs twice counts twice."""
        flat: list[Term] = []
        for addend in addends:
            flat += addend.operands if addend.name == "sum" else (addend,)
        flat = sorted(self._joined(flat), key=lambda term: term.number)
        shape = addends[0].shape
        return flat[0] if len(flat) == 1 else self.call("sum", *flat, shape=shape)

    def _joined(self, addends: list[Term]) -> list[Term]:
        """Replace sums over columns of a linear by the linear, if each column is there once."""
        parts: dict[tuple[Term, Term], list[tuple[int, int]]] = {}
        for addend in addends:
            if addend.name == "linear of columns":
                x, weight, *columns = addend.args
                parts.setdefault((x, weight), []).append((columns[0], columns[1]))
        whole = {
            (x, weight)
            for (x, weight), columns in parts.items()
            if is_partition(columns, weight.shape[1])
        }
        if not whole:
            return addends
        unjoined = [a for a in addends if a.name != "linear of columns" or a.args[:2] not in whole]
        return unjoined + [self.linear(x, weight, None) for x, weight in whole]

    def gated_experts(self, x: Term, ids: Term, gate_up: Term, first: int) -> Term:
        """Return silu(gate) · up of the chosen experts that a rank holds, from `first` on."""
        shape = (*ids.shape, gate_up.shape[1] // 2)
        return self.call("gated experts", x, ids, gate_up, first, shape=shape)

    def sum_of_experts(self, x: Term, scores: Term, ids: Term, down: Term, first: int) -> Term:
        """Return the sum of the results of the chosen experts that a rank holds."""
        shape = (x.shape[0], down.shape[1])
        return self.call("sum of experts", x, scores, ids, down, first, shape=shape)

    def best_of_rows(self, x: Term, start: int, stop: int) -> Term:
        """Return the greatest of some columns."""
        return self.call("best of rows", x, start, stop, shape=(x.shape[0], 1))

    def its_row(self, x: Term, start: int, stop: int, first: int) -> Term:
        """Return the number of the greatest of some columns, which are numbered from `first` on."""
        return self.call("its row", x, start, stop, first, shape=(x.shape[0], 1))

    def greatest(self, *pairs: Term) -> Term:
        """Return the first row with the greatest value, from the best of some rows each.

        The first half of `pairs` are values, and the second half their rows. Runs of rows of one
        value must follow each other.
        """
        count = len(pairs) // 2
        runs: list[list[Any]] = []
        for best, row in zip(pairs[:count], pairs[count:], strict=True):
            if (best.name, row.name) != ("best of rows", "its row") or best.args != row.args[:3]:
                return self.call("greatest", *pairs)
            value, start, stop, first = row.args
            if runs and runs[-1][:2] == [value, first] and runs[-1][3] == start:
                runs[-1][3] = stop
            else:
                runs.append([value, first, start, stop])
        if any((start, stop) != (0, value.shape[-1]) for value, _, start, stop in runs):
            return self.call("greatest", *pairs)
        return self.argmax((value, first) for value, first, *_ in runs)

    def argmax(self, parts: Iterator[tuple[Term, int]]) -> Term:
        """Return the column with the greatest value, from parts of rows and their first columns."""
        flat = [item for part in dict.fromkeys(parts) for item in part]
        return self.call("argmax", *flat, shape=(TOKENS,))


def _plain(arg: Any) -> Any:
    if isinstance(arg, float):
        return to_fp32(arg)
    return tuple(map(_plain, arg)) if isinstance(arg, list | tuple) else arg


def is_partition(intervals: list[tuple[int, int]], extent: int) -> bool:
    """Return whether intervals cover `0:extent` and contain each element once."""
    end = 0
    for start, stop in sorted(intervals):
        if start != end:
            return False
        end = stop
    return end == extent


_ANOTHER_CALL = 10
_DEPTH = 8


def unlike(term: Any, other: Any, depth: int = _DEPTH) -> int:
    """Return a distance of two terms: the number of different operands, more if calls differ."""
    if term is other or term == other:
        return 0
    if not (isinstance(term, Term) and isinstance(other, Term)) or depth == 0:
        return 1
    if term.name != other.name or len(term.args) != len(other.args):
        return _ANOTHER_CALL
    pairs = zip(*_unmatched(term, other), strict=True)
    return max(1, sum(unlike(a, b, depth - 1) for a, b in pairs))


def _unmatched(term: Term, other: Term) -> tuple[list[Any], list[Any]]:
    """Return the operands of two calls; of sums, only the unmatched ones."""
    if term.name != "sum":
        return list(term.args), list(other.args)
    left, right = Counter(term.args), Counter(other.args)
    return list((left - right).elements()), list((right - left).elements())


class Difference:
    """The innermost difference of two terms, and the calls that contain it, outermost first.

    `names` are those of terms that have one. Two such terms differ as a whole.
    """

    def __init__(self, wanted: Any, got: Any, names: Mapping[Term, str]) -> None:
        self.path: list[Term] = []
        self._names, self._argument = names, ""
        while not {wanted, got} <= names.keys() and (inner := _inner(wanted, got)) is not None:
            self.path.append(wanted)
            self._argument = _argument(wanted, inner[0])
            wanted, got = inner
        self.wanted, self.got = wanted, got

    def __str__(self) -> str:
        path = [term.name for term in self.path[-3:]]
        where = f", in {' of '.join(reversed(path))}," if path else ""
        wanted, got = (
            (isinstance(side, Term) and self._names.get(side)) or _text(side, 2)
            for side in (self.wanted, self.got)
        )
        argument = "" if isinstance(self.wanted, Term) else self._argument
        return f"has {argument}{wanted}{where} where the program has {got}"


def _inner(wanted: Any, got: Any) -> tuple[Any, Any] | None:
    """Return the operands in which two terms differ, if everything else is the same."""
    if not (isinstance(wanted, Term) and isinstance(got, Term)) or wanted.name != got.name:
        return None
    if wanted.name in _LEAVES or len(wanted.args) != len(got.args):
        return None
    pairs = list(zip(*_unmatched(wanted, got), strict=True))
    if wanted.name == "sum" and len(pairs) > 1:
        return None
    return next(((a, b) for a, b in pairs if a is not b and a != b), None)


def is_mistaken(wanted: Any, got: Any, inherited: Collection[Term]) -> bool:
    """Return whether a term differs from the wanted one in more than its `inherited` parts."""
    if wanted is got or wanted == got or got in inherited:
        return False
    alike = isinstance(wanted, Term) and isinstance(got, Term) and wanted.name == got.name
    if not alike or wanted.name in _LEAVES or len(wanted.args) != len(got.args):
        return True
    pairs = zip(*_unmatched(wanted, got), strict=True)
    return any(is_mistaken(*pair, inherited) for pair in pairs)


def _argument(call: Term, value: Any) -> str:
    """Return the name of the argument of a call that has this value, such as `eps=`."""
    names = _ARGUMENTS.get(call.name, ())
    pairs = zip(names, call.args, strict=False)
    return next((f"{name}=" for name, argument in pairs if argument is value), "")


_SPANS = ("q", "cache", "tables", "lengths", "scale", "window", "block", "spans", "kv_heads")
_ARGUMENTS = {spec.name: spec.argument_names for spec in SPECS.values()} | {
    "values of spans": _SPANS,
    "lse of spans": _SPANS,
}
_LEAVES = ("input", "weight")
