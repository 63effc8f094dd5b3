"""Index expressions: quotients, remainders and sums are those of numbers, in one form."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tpcompile.ir.values.index import (
    COORDINATE,
    Index,
    Inexact,
    bounds,
    divided,
    plus,
    reordering,
    replaced,
    shifted,
    threshold_split,
    times,
    variable,
)

_EXTENTS = (6, 8)
_I, _J = (variable(COORDINATE, name, extent) for name, extent in enumerate(_EXTENTS))


def _value(index: Index, places: tuple[int, ...]) -> int:
    total = index.constant
    for factor, (_, name, _), divisor, modulus in index.digits:
        if isinstance(name, Inexact):
            inner = _value(name.dividend, places)
            number = inner % name.divisor if name.remainder else inner // name.divisor
        else:
            number = places[name]
        total += factor * (number // divisor % modulus if modulus else number // divisor)
    return total


@st.composite
def _indices(draw: st.DrawFn) -> Index:
    index = plus(times(_I, draw(st.sampled_from([0, 1, 2, 8]))), times(_J, draw(st.integers(0, 3))))
    index = shifted(index, draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 3))):
        parts = divided(index, draw(st.sampled_from([2, 3, 4, 6, 8])))
        index = draw(st.sampled_from([*parts, plus(*parts), plus(index, times(parts[1], 4))]))
    return index


@settings(max_examples=300, deadline=None)
@given(_indices(), st.sampled_from([2, 3, 4, 5, 8, 16]))
def test_quotients_and_remainders(index: Index, divisor: int) -> None:
    quotient, remainder = divided(index, divisor)
    low, end = bounds(index)
    for places in product(*map(range, _EXTENTS)):
        number = _value(index, places)
        assert end is not None and low <= number < end
        assert divmod(number, divisor) == (_value(quotient, places), _value(remainder, places))


@settings(max_examples=200, deadline=None)
@given(_indices(), st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_pieces_that_an_index_reaches(index: Index, extents: list[int]) -> None:
    split = threshold_split(index, tuple(extents))
    if split is None:
        return
    of, sizes = split
    assert sum(sizes) == of.extent
    edges = [sum(extents[:place]) for place in range(1, len(extents))]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    for start, size in zip(starts, sizes, strict=True):
        numbers = {
            sum(_value(index, places) >= edge for edge in edges)
            for places in product(*map(range, _EXTENTS))
            if start <= places[of.name] < start + size
        }
        assert len(numbers) <= 1


def test_a_view_and_its_inverse_cancel() -> None:
    flat = plus(times(_I, 8), _J)
    assert divided(flat, 8) == (_I, _J)
    whole = variable(COORDINATE, 2, 48)
    run, rest = divided(whole, 16)
    assert plus(times(run, 16), rest) == whole


def test_a_permutation_and_its_inverse_cancel() -> None:
    name = (COORDINATE, 1)
    halves = plus(times(divided(_J, 2)[1], 4), divided(_J, 2)[0])
    inverse = reordering(halves, name)
    assert inverse is not None
    assert replaced(halves, {name: inverse}, lambda term: term) == _J
    assert replaced(inverse, {name: halves}, lambda term: term) == _J
    assert reordering(plus(times(_J, 2), _I), name) is None
