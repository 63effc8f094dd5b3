"""The sizes of programs."""

from __future__ import annotations

from tpcompile.runtime.ranks.step import size_for


def test_sizes_are_powers_of_two_and_three_quarters_of_them() -> None:
    sizes = [size_for(rows) for rows in range(1, 18)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
