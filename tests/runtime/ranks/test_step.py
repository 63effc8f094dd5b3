"""The sizes of programs."""

from __future__ import annotations

from tpcompile.runtime.ranks.step import size_for


def test_sizes_are_multiples_of_parts_of_powers_of_two() -> None:
    sizes = [size_for(rows, 4) for rows in range(1, 18)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]
    sizes = [size_for(rows, 8) for rows in range(1, 18)]
    assert sizes == [*range(1, 9), 10, 10, 12, 12, 14, 14, 16, 16, 20]
