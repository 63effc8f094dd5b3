"""Reorderings of what a sum binds, and their inverses."""

from __future__ import annotations

from tests.ir.values.indices import COLUMN, ROW
from tpcompile.ir.values.change import replaced
from tpcompile.ir.values.index import COORDINATE, divided, plus, times
from tpcompile.ir.values.orders import reordering


def test_a_permutation_and_its_inverse_cancel() -> None:
    name = (COORDINATE, 1)
    halves = plus(times(divided(COLUMN, 2)[1], 4), divided(COLUMN, 2)[0])
    inverse = reordering(halves, name)
    assert inverse is not None
    assert replaced(halves, {name: inverse}, lambda term: term) == COLUMN
    assert replaced(inverse, {name: halves}, lambda term: term) == COLUMN
    assert reordering(plus(times(COLUMN, 2), ROW), name) is None
