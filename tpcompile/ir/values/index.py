"""Index expressions: sums of digits of index variables, in one normal form.

A digit is `coefficient * ((variable // divisor) % modulus)`. Reshapes, transposes, slices and
permutations of rows map indices to such sums, so that a view and its inverse cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

COORDINATE, BOUND, COMPUTED = 0, 1, 2


class Variable(NamedTuple):
    """An index variable with values from 0 to `extent`; an extent of 0 is symbolic.

    A coordinate is an axis of the value, a bound variable that of a sum (counted from the
    innermost one), and a computed one an element of a value of integers, or a quotient or a
    remainder that is not a digit.
    """

    kind: int
    name: Any
    extent: int


class Digit(NamedTuple):
    """`coefficient * ((variable // divisor) % modulus)`; a modulus of 0 is unbounded."""

    coefficient: int
    variable: Variable
    divisor: int
    modulus: int


class Index(NamedTuple):
    """A sum of a constant and digits."""

    constant: int
    digits: tuple[Digit, ...]


ZERO = Index(0, ())


class Inexact(NamedTuple):
    """The name of a computed variable: a quotient (or remainder) that is not a sum of digits."""

    dividend: Index
    divisor: int
    remainder: bool


def constant(value: int) -> Index:
    return Index(value, ())


def variable(kind: int, name: Any, extent: int) -> Index:
    """Return a variable as an index; that of an axis with one element is zero."""
    if extent == 1:
        return ZERO
    return Index(0, (Digit(1, Variable(kind, name, extent), 1, extent),))


def plus(*indices: Index) -> Index:
    """Add indices."""
    return sum_of(
        sum(index.constant for index in indices),
        [digit for index in indices for digit in index.digits],
    )


def shifted(index: Index, offset: int) -> Index:
    return Index(index.constant + offset, index.digits) if offset else index


def times(index: Index, factor: int) -> Index:
    if factor == 1:
        return index
    if factor == 0:
        return ZERO
    return Index(
        index.constant * factor,
        tuple(digit._replace(coefficient=digit.coefficient * factor) for digit in index.digits),
    )


def bounds(index: Index) -> tuple[int, int | None]:
    """Return the least value and the end of the values of an index; None if it is unbounded."""
    low = high = index.constant
    unbounded = False
    for digit in index.digits:
        if digit.coefficient < 0:
            low += digit.coefficient * (digit.modulus - 1)
        elif digit.modulus:
            high += digit.coefficient * (digit.modulus - 1)
        else:
            unbounded = True
    return low, None if unbounded else high + 1


def divided(index: Index, divisor: int) -> tuple[Index, Index]:
    """Return the quotient and the remainder of an index that is at least zero."""
    if divisor == 1:
        return index, ZERO
    low, high = bounds(index)
    if high is not None and low >= 0 and high <= divisor:
        return ZERO, index
    parts = _divided(index, divisor)
    if parts is not None:
        return parts
    extent = 0 if high is None else -(-high // divisor)
    return (
        variable(COMPUTED, Inexact(index, divisor, False), extent),
        variable(COMPUTED, Inexact(index, divisor, True), divisor),
    )


def _divided(index: Index, divisor: int) -> tuple[Index, Index] | None:
    quotient_constant, remainder_constant = divmod(index.constant, divisor)
    quotient: list[Digit] = []
    remainder: list[Digit] = []
    for digit in index.digits:
        factor, of, digit_divisor, modulus = digit
        if factor % divisor == 0:
            quotient.append(Digit(factor // divisor, of, digit_divisor, modulus))
            continue
        split, odd = divmod(divisor, factor)
        if odd or factor < 0 or 0 < modulus <= split:
            remainder.append(digit)
            continue
        if modulus and modulus % split and modulus != count_of(of, digit_divisor):
            return None
        remainder.append(Digit(factor, of, digit_divisor, split))
        quotient.append(Digit(1, of, digit_divisor * split, -(-modulus // split)))
    low = Index(remainder_constant, tuple(remainder))
    least, end = bounds(low)
    if end is None or least < 0 or end > divisor:
        return None
    return sum_of(quotient_constant, quotient), sum_of(remainder_constant, remainder)


def count_of(of: Variable, divisor: int) -> int:
    """Return the number of values of `variable // divisor`, 0 if there is no bound."""
    return -(-of.extent // divisor)


def sum_of(constant: int, digits: Iterable[Digit]) -> Index:
    """Return the normal form of a sum of digits: sorted, with adjacent digits joined."""
    whole = [digit for digit in map(_within_extent, digits) if digit.modulus != 1]
    whole = [digit for digit in whole if digit.coefficient]
    if len(whole) < 2:
        return Index(constant, tuple(whole))
    whole.sort(key=_order)
    joined: list[Digit] = []
    for digit in whole:
        combined = _joined(joined[-1], digit) if joined else None
        if combined is None:
            joined.append(digit)
        else:
            joined[-1] = combined
    return Index(constant, tuple(joined)) if len(joined) == len(whole) else sum_of(constant, joined)


def _within_extent(digit: Digit) -> Digit:
    """Return a digit whose modulus is not above the number of its values."""
    count = count_of(digit.variable, digit.divisor)
    if count and (not digit.modulus or digit.modulus > count):
        return digit._replace(modulus=count)
    return digit


def _joined(low: Digit, high: Digit) -> Digit | None:
    """Return the sum of two digits of a variable as one digit, or None."""
    if low.variable != high.variable:
        return None
    if low[2:] == high[2:]:
        return low._replace(coefficient=low.coefficient + high.coefficient)
    adjacent = low.modulus and high.divisor == low.divisor * low.modulus
    if adjacent and high.coefficient == low.coefficient * low.modulus:
        return low._replace(modulus=low.modulus * high.modulus)
    return None


def _order(digit: Digit) -> tuple[Any, ...]:
    kind, name, extent = digit.variable
    return kind, order_of(name), extent, digit.divisor, digit.modulus, digit.coefficient


def order_of(name: Any) -> tuple[Any, ...]:
    """Return the place of a variable's name in the order of digits."""
    if isinstance(name, Inexact):
        index, divisor, remainder = name
        digits = tuple(_order(digit) for digit in index.digits)
        return 2, index.constant, divisor, remainder, digits
    return (0, name) if isinstance(name, int) else (1, name.number)


Name = tuple[int, Any]
"""The kind and the name of a variable, whatever its extent."""


def names_of(index: Index) -> Iterator[Name]:
    """Yield the coordinates and bound variables of an index."""
    for digit in index.digits:
        kind, name, _ = digit.variable
        if kind != COMPUTED:
            yield kind, name
        elif isinstance(name, Inexact):
            yield from names_of(name.dividend)
        else:
            yield from name.free


def numbers_of(index: Index) -> Iterator[Any]:
    """Yield the terms that compute parts of an index."""
    for digit in index.digits:
        kind, name, _ = digit.variable
        if kind == COMPUTED:
            if isinstance(name, Inexact):
                yield from numbers_of(name.dividend)
            else:
                yield name
