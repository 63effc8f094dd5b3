"""Guesses from the text: what followed the latest occurrence of the longest run at the end."""

from __future__ import annotations

from random import Random

import pytest

from tpcompile.serving.speculation import PromptDrafter, Wanted


def guesses(tokens: list[int], most: int = 4) -> list[int]:
    return PromptDrafter(8).propose([Wanted("a", tokens, most)])[0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([7, 2, 5, 1, 2, 6, 7, 2], [5, 1, 2, 6]),
        ([1, 5, 3, 1, 6, 1], [6, 1, 6, 1]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
    ids=["a run", "a longer run first", "the latest", "a period", "a token", "none", "one token"],
)
def test_what_followed(tokens: list[int], expected: list[int]) -> None:
    assert guesses(tokens) == expected


def test_a_text_that_grows_is_looked_at_once() -> None:
    """Guesses are those for the whole text at once; another text has an index of its own."""
    dice = Random(1)
    drafter, text = PromptDrafter(8), list[int]()
    for _ in range(300):
        text += [dice.randrange(6) for _ in range(dice.randrange(1, 4))]
        assert drafter.propose([Wanted(1, text, 5), Wanted(2, [9, 9], 2)]) == [
            guesses(text, 5),
            [9, 9],
        ]
    drafter.forget(1)
    assert drafter.propose([Wanted(1, [3, 5, 3], 1)]) == [[5]]
