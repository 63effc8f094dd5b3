"""Names are folded by their first number, and lists of names come back."""

from __future__ import annotations

import pytest

from tpcompile.ir.text.folding import MOST_NAMES, folded, unfolded


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["l0_q", "l1_q", "l2_q", "l5_q"], ["l{0..2,5}_q"]),
        (["l3_q", "l1_q"], ["l{1,3}_q"]),
        (["l7_q"], ["l7_q"]),
        (["x", "y"], ["x", "y"]),
        (["l0_w2", "l1_w2", "l0_w3"], ["l{0..1}_w2", "l0_w3"]),
        (["007", "1234567890"], ["007", "1234567890"]),
    ],
)
def test_both_ways(names: list[str], text: list[str]) -> None:
    assert folded(names) == text
    assert sorted(name for pattern in text for name in unfolded(pattern)) == sorted(names)


@pytest.mark.parametrize("numbers", ["", "a", "1..", "01", "1...2", "-1", "1,,2", " 1"])
def test_numbers_that_are_not_valid(numbers: str) -> None:
    with pytest.raises(ValueError, match="numbers such as"):
        unfolded(f"l{{{numbers}}}_q")


def test_a_range_has_a_limit() -> None:
    assert len(unfolded(f"l{{1..{MOST_NAMES}}}")) == MOST_NAMES
    with pytest.raises(ValueError, match="at most 65,536 names"):
        unfolded(f"l{{0..{MOST_NAMES}}}")
