"""Random index expressions of two coordinates, and their numbers."""

from __future__ import annotations

from hypothesis import strategies as st

from tpcompile.ir.values.index import (
    COORDINATE,
    Index,
    Inexact,
    divided,
    plus,
    shifted,
    times,
    variable,
)

EXTENTS = (6, 8)
ROW, COLUMN = (variable(COORDINATE, name, extent) for name, extent in enumerate(EXTENTS))


def value_at(index: Index, places: tuple[int, ...]) -> int:
    """Return the number of an index at a place per coordinate."""
    total = index.constant
    for factor, (_, name, _), divisor, modulus in index.digits:
        if isinstance(name, Inexact):
            inner = value_at(name.dividend, places)
            number = inner % name.divisor if name.remainder else inner // name.divisor
        else:
            number = places[name]
        total += factor * (number // divisor % modulus if modulus else number // divisor)
    return total


@st.composite
def indices(draw: st.DrawFn) -> Index:
    """Draw an index."""
    index = plus(
        times(ROW, draw(st.sampled_from([0, 1, 2, 8]))), times(COLUMN, draw(st.integers(0, 3)))
    )
    index = shifted(index, draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 3))):
        parts = divided(index, draw(st.sampled_from([2, 3, 4, 6, 8])))
        index = draw(st.sampled_from([*parts, plus(*parts), plus(index, times(parts[1], 4))]))
    return index
