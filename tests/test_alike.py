"""Tests of layers that are alike: their kinds, runs of numbers, and how kinds repeat."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tpcompile.alike import Repeat, kinds_of, layers_by_key, repeat_of, runs_of

MOST_LAYERS = 16


def test_layers_with_equal_keys_are_of_one_kind() -> None:
    assert kinds_of(["full", "window", "full", "linear"]) == (0, 1, 0, 2)
    assert layers_by_key([(3, "full"), (4, "window"), (5, "full")]) == {
        "full": [3, 5],
        "window": [4],
    }
    assert kinds_of([]) == ()


def test_runs_are_of_consecutive_numbers() -> None:
    assert runs_of([0, 1, 2, 5, 7, 8]) == [range(3), range(5, 6), range(7, 9)]
    assert runs_of([]) == []


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        pytest.param("abbbb", Repeat(1, 1, 4), id="all but the first"),
        pytest.param("abbb", None, id="too few"),
        pytest.param("abababababa", Repeat(1, 2, 5), id="two in turn"),
        pytest.param("abababab", Repeat(0, 2, 4), id="two in turn, from the first on"),
        pytest.param("xbababababa", Repeat(1, 2, 5), id="two in turn after another first"),
        pytest.param("xbabababab", Repeat(2, 2, 4), id="a part of a period comes before"),
        pytest.param("aaaabbbbbb", Repeat(4, 1, 6), id="one kind after the other"),
        pytest.param("aaaaaaabbbbb", Repeat(0, 1, 7), id="one kind before the other"),
        pytest.param("xcccacccacccaccca", Repeat(1, 4, 4), id="three of one kind, then another"),
        pytest.param("abcdefghij", None, id="all different"),
        pytest.param("", None, id="no layers"),
    ],
)
def test_repeats(kinds: str, expected: Repeat | None) -> None:
    assert repeat_of(kinds_of(kinds), 3) == expected


def test_no_other_repeat_has_more_layers() -> None:
    dice = Random(1)
    for _ in range(300):
        period, count = dice.randint(1, 3), dice.randint(0, MOST_LAYERS)
        kinds = [layer % period for layer in range(count)]
        for _ in range(dice.randint(0, 2) if kinds else 0):
            kinds[dice.randrange(count)] = 3
        least = dice.randint(1, 4)
        repeat = repeat_of(kinds, least)
        wanted = max((beyond(candidate, least) for candidate in repeats_in(kinds)), default=0)
        assert max(0, wanted) == (0 if repeat is None else beyond(repeat, least))
        assert repeat is None or repeat in repeats_in(kinds)


def beyond(repeat: Repeat, least: int) -> int:
    return (repeat.count - least) * repeat.period


def repeats_in(kinds: Sequence[int]) -> list[Repeat]:
    """Return all repeats, found by trying each start, period and count."""
    return [
        Repeat(start, period, count)
        for start in range(len(kinds))
        for period in range(1, len(kinds))
        for count in range(1, (len(kinds) - start) // period + 1)
        if all(
            kinds[layer] == kinds[layer + period]
            for layer in range(start, start + (count - 1) * period)
        )
    ]
