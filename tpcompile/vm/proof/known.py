"""Sets of instructions that are known to be done: all before one of them, and some behind it.

What is known to be done is nearly everything up to a layer ago, and some of what is in flight.
So a set takes as many bits as the instructions in flight, however long the program is.
"""

from __future__ import annotations

from collections.abc import Sequence

Known = tuple[int, int]
"""All numbers below the first, and those for which the second has a bit, counted from the first."""

NOTHING: Known = (0, 0)


def union(one: Known, other: Known) -> Known:
    """What is in either of two sets."""
    base, bits = one
    low, more = other
    if base < low:
        base, bits, low, more = low, more, base, bits
    bits |= more >> (base - low)
    return _raised(base, bits) if bits & 1 else (base, bits)


def with_one(known: Known, number: int) -> Known:
    """The set with one more in it."""
    base, bits = known
    if number < base:
        return known
    bits |= 1 << (number - base)
    return _raised(base, bits) if bits & 1 else (base, bits)


def in_at_least(sets: Sequence[Known], least: int) -> Known:
    """The elements of at least `least` of the sets: from 1 of them to all.

    The number of sets that hold an element is counted in binary, for all elements at once:
    `digits[i]` has a bit for each element whose count has the digit 2^i.
    """
    base = min(low for low, _ in sets)
    digits: list[int] = []
    for low, more in sets:
        carry = more << (low - base) | (1 << (low - base)) - 1
        for place, digit in enumerate(digits):
            digits[place], carry = digit ^ carry, digit & carry
        if carry:
            digits.append(carry)
    more_than, as_many = 0, -1
    for place in reversed(range(max(len(digits), least.bit_length()))):
        digit = digits[place] if place < len(digits) else 0
        if least >> place & 1:
            as_many &= digit
        else:
            more_than |= as_many & digit
            as_many &= ~digit
    found = more_than | as_many
    return _raised(base, found) if found & 1 else (base, found)


def has(known: Known, number: int) -> bool:
    base, bits = known
    return number < base or bool(bits >> (number - base) & 1)


def _raised(base: int, bits: int) -> Known:
    """A set of which the first number is there too, with the first that is not in its place."""
    run = (bits ^ (bits + 1)).bit_length() - 1
    return base + run, bits >> run


Several = tuple[int, int, int]
"""Some instructions: the first, the last, and bits counted from the first."""


def several(numbers: Sequence[int]) -> Several:
    """One or more, in any order."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], 1
    first, last = min(numbers), max(numbers)
    bits = 0
    for number in numbers:
        bits |= 1 << (number - first)
    return first, last, bits


def missing(some: Several, known: Known) -> int | None:
    """The last of some instructions that is not known to be done; None if all are."""
    first, last, bits = some
    base, more = known
    if last < base:
        return None
    if first < base:
        bits >>= base - first
        first = base
    left = bits & ~(more >> (first - base))
    return first + left.bit_length() - 1 if left else None
