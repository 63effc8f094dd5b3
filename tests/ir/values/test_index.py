"""Index expressions: quotients, remainders and sums are those of numbers, in one form."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ir.values.indices import COLUMN, EXTENTS, ROW, indices, value_at
from tpcompile.ir.values.index import COORDINATE, Index, bounds, divided, plus, times, variable


@settings(max_examples=300, deadline=None)
@given(indices(), st.sampled_from([2, 3, 4, 5, 8, 16]))
def test_quotients_and_remainders(index: Index, divisor: int) -> None:
    quotient, remainder = divided(index, divisor)
    low, end = bounds(index)
    for places in product(*map(range, EXTENTS)):
        number = value_at(index, places)
        assert end is not None and low <= number < end
        assert divmod(number, divisor) == (value_at(quotient, places), value_at(remainder, places))


def test_a_view_and_its_inverse_cancel() -> None:
    flat = plus(times(ROW, 8), COLUMN)
    assert divided(flat, 8) == (ROW, COLUMN)
    whole = variable(COORDINATE, 2, 48)
    run, remainder = divided(whole, 16)
    assert plus(times(run, 16), remainder) == whole
