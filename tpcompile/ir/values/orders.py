"""The orders in which the operands of sums are stored."""

from __future__ import annotations

from tpcompile.ir.values.change import deeper
from tpcompile.ir.values.index import BOUND, Digit, Index, Name, sum_of
from tpcompile.ir.values.node import Term, binders_of

INNERMOST: Name = (BOUND, 0)
"""The variable that an operand binds, or the innermost of them."""


class Orders:
    """The first reordering of a bound variable in each term."""

    def __init__(self) -> None:
        self._known: dict[tuple[Term, int], Index | None] = {}

    def of(self, term: Term) -> Index | None:
        """Return the inverse of the first reordering of a term's bound variable, or None."""
        if INNERMOST in term.free and (term, 0) not in self._known:
            self._find(term)
        return self._known.get((term, 0))

    def _find(self, term: Term) -> None:
        """Find the reorderings of a term and of its parts."""
        stack = [(term, 0)]  # terms are as deep as a model
        while stack:
            current, level = stack[-1]
            name = (BOUND, level)
            if (current, level) in self._known or name not in current.free:
                self._known.setdefault((current, level), None)
                stack.pop()
                continue
            inner = level + binders_of(current)
            left = [
                (arg, inner)
                for arg in current.args
                if (BOUND, inner) in arg.free and (arg, inner) not in self._known
            ]
            if left:
                stack += left
                continue
            orders = [reordering(index, name) for index in current.indices]
            orders += [
                deeper(order, level - inner)
                for arg in current.args
                if (order := self._known.get((arg, inner))) is not None
            ]
            self._known[current, level] = next(filter(None, orders), None)
            stack.pop()


def reordering(index: Index, name: Name) -> Index | None:
    """Return the inverse of the permutation of a variable's values that an index contains.

    Return None if the index contains the variable in order, not at all, or not as a permutation.
    """
    digits = [digit for digit in index.digits if digit.variable[:2] == name]
    if len(digits) < 2:
        return None
    unit = min(digit.coefficient for digit in digits)
    of = digits[0].variable
    if unit < 1 or any(digit.coefficient % unit for digit in digits):
        return None
    places = [(digit.coefficient // unit, digit.divisor, digit.modulus) for digit in digits]
    for side in (0, 1):
        total = 1
        for place in sorted(places, key=lambda place: place[side]):
            if place[side] != total:
                return None
            total *= place[2]
        if total != of.extent:
            return None
    return sum_of(0, [Digit(divisor, of, factor, modulus) for factor, divisor, modulus in places])
