"""Sets of completed instructions agree with Python's sets."""

from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import MANY
from tpcompile.vm.proof.known import (
    NOTHING,
    Known,
    has,
    in_at_least,
    missing,
    several,
    union,
    with_one,
)

numbers = st.lists(st.integers(0, 12), max_size=12)


def known_of(some: list[int]) -> Known:
    return reduce(with_one, some, NOTHING)


@MANY
@given(numbers, numbers)
def test_union(first: list[int], second: list[int]) -> None:
    joined = union(known_of(first), known_of(second))
    assert [n for n in range(20) if has(joined, n)] == sorted({*first, *second})
    assert joined == known_of([*first, *second]), "sets have a canonical form"


@MANY
@given(st.lists(numbers, min_size=1, max_size=6), st.integers(1, 6))
def test_in_at_least(sets: list[list[int]], least: int) -> None:
    least = min(least, len(sets))
    common = in_at_least([known_of(members) for members in sets], least)
    assert common == known_of(
        [n for n in range(13) if sum(n in members for members in sets) >= least]
    )


@MANY
@given(numbers, numbers.filter(len))
def test_missing(done: list[int], some: list[int]) -> None:
    assert missing(several(some), known_of(done)) == max(set(some) - set(done), default=None)


def test_what_is_done_from_the_beginning_takes_no_bits() -> None:
    assert known_of(list(range(10_000))) == (10_000, 0)
    assert union((10_000, 2), (3, 1)) == (10_000, 2)
