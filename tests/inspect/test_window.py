"""Tests of the window that a picture of a long program shows, and of its caption."""

from __future__ import annotations

from tests.inspect.schedules import CUT, LONG, SHORT, ranked
from tpcompile.inspect.window import window_of


def test_what_a_window_says() -> None:
    assert window_of(SHORT[0]).whole
    said = [window_of(timeline).said for timeline in LONG]
    assert said[0].startswith("layers 0 to ") and said[0].endswith(" of 60")
    assert said[2].endswith(", ranks 0 to 7 of 16")
    wide = ranked(40, 200, 2)
    assert window_of(wide).said.endswith(", workers 0 to 159 of 200 of rank 0")
    assert window_of(ranked(4, 100, 2)).said == "the whole duration, rank 0 of 2"


def test_without_layers_the_first_instructions() -> None:
    window = window_of(CUT)
    assert window.said == "the first 120 instructions"
    across = zip(CUT.timing.starts, CUT.timing.finishes, strict=True)
    assert any(start < window.stop < finish for start, finish in across), "some must be cut"
