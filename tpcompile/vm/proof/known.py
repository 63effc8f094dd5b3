"""Sets of instructions known to be complete: all instructions below a base, and some above it.

Nearly all instructions up to about a layer ago are known to be complete, and some of those in
flight. So a set needs one bit per instruction in flight, however long the program is.
"""

from __future__ import annotations

from collections.abc import Sequence

Known = tuple[int, int]
"""A base and bits: all numbers below the base, and `base + i` for each set bit i."""

NOTHING: Known = (0, 0)


def union(known: Known, other: Known) -> Known:
    """Return the union of two sets."""
    base, bits = known
    low, more = other
    if base < low:
        base, bits, low, more = low, more, base, bits
    bits |= more >> (base - low)
    return _raised(base, bits) if bits & 1 else (base, bits)


def with_one(known: Known, number: int) -> Known:
    """Return the set with `number` added."""
    base, bits = known
    if number < base:
        return known
    bits |= 1 << (number - base)
    return _raised(base, bits) if bits & 1 else (base, bits)


def in_at_least(sets: Sequence[Known], least: int) -> Known:
    """Return the numbers that are in at least `least` of the sets, where `least` is at least 1.

    The number of sets that contain each number is counted in binary, for all numbers at once:
    `digits[i]` has a bit set for each number whose count has binary digit i set.
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
    bits = more_than | as_many
    return _raised(base, bits) if bits & 1 else (base, bits)


def has(known: Known, number: int) -> bool:
    base, bits = known
    return number < base or bool(bits >> (number - base) & 1)


def _raised(base: int, bits: int) -> Known:
    """Return the set with the base raised to its first missing number; bit 0 must be set."""
    run = (bits ^ (bits + 1)).bit_length() - 1
    return base + run, bits >> run


Several = tuple[int, int, int]
"""A set of instructions: the first, the last, and bits where bit i stands for `first + i`."""


def several(numbers: Sequence[int]) -> Several:
    """Return the set of one or more instructions, which may be in any order."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], 1
    first, last = min(numbers), max(numbers)
    bits = 0
    for number in numbers:
        bits |= 1 << (number - first)
    return first, last, bits


def missing(some: Several, known: Known) -> int | None:
    """Return the last of some instructions that is not known to be complete; None if all are."""
    first, last, bits = some
    base, more = known
    if last < base:
        return None
    if first < base:
        bits >>= base - first
        first = base
    left = bits & ~(more >> (first - base))
    return first + left.bit_length() - 1 if left else None
