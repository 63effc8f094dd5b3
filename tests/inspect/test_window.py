"""Tests of the window that a picture of a long program shows, and of its caption."""

from __future__ import annotations

import pytest

from tests.inspect.schedules import CUT, LONG, SHORT, ranked
from tpcompile.errors import UsageError
from tpcompile.inspect.window import window_of
from tpcompile.vm.program.instruction import Range


def test_what_a_window_says() -> None:
    assert window_of(SHORT[0]).whole
    texts = [window_of(timeline).description for timeline in LONG]
    assert texts[0].startswith("layers 0 to ") and texts[0].endswith(" of 60")
    assert texts[2].endswith(", ranks 0 to 7 of 16")
    wide = ranked(40, 200, 2)
    assert window_of(wide).description.endswith(", workers 0 to 159 of 200 of rank 0")
    assert window_of(ranked(4, 100, 2)).description == "the whole duration, rank 0 of 2"


def test_without_layers_the_first_instructions() -> None:
    window = window_of(CUT)
    assert window.description == "the first 120 instructions"
    across = zip(CUT.timing.starts, CUT.timing.finishes, strict=True)
    assert any(start < window.stop < finish for start, finish in across), "some must be cut"


def test_chosen_layers() -> None:
    window = window_of(LONG[0], Range(5, 7))
    assert window.description == "layers 5 to 6 of 60" and not window.whole
    assert window_of(LONG[2], Range(39, 40)).description == "layer 39 of 40, ranks 0 to 7 of 16"
    timing = LONG[0].timing
    numbers = [n for n, step in enumerate(LONG[0].program.instructions) if step.layer in (5, 6)]  # type: ignore[attr-defined]
    assert window.start == min(timing.starts[n] for n in numbers)
    assert window.stop == max(timing.finishes[n] for n in numbers)


@pytest.mark.parametrize("layers", [Range(0, 61), Range(60, 61), Range(2, 2), Range(-1, 2)])
def test_layers_that_are_not_there(layers: Range) -> None:
    with pytest.raises(UsageError, match=r"must be a part of 0:60"):
        window_of(LONG[0], layers)


def test_what_is_shown() -> None:
    """Instructions that touch the time, those without a duration at its start among them."""
    window = window_of(LONG[0], Range(5, 7))
    assert window.shows(window.start - 1, window.start + 1)
    assert window.shows(window.start, window.start)
    assert not window.shows(window.start - 1, window.start)
    assert not window.shows(window.stop, window.stop + 1)
