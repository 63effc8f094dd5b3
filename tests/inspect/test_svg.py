"""Tests of the elements of SVG pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tpcompile.inspect import svg


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (10.0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (19.9, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]),
        (0.42, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]),
        (23_456.0, [0, 5000, 10_000, 15_000, 20_000]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round(stop: float, expected: list[float]) -> None:
    assert svg.ticks(0.0, stop, 10) == pytest.approx(expected)


def test_ticks_are_few() -> None:
    for exponent in range(-30, 60):
        ticks = svg.ticks(0.0, 1.37**exponent, 10)
        assert 4 <= len(ticks) <= 11


def test_whatever_a_name_holds_is_xml() -> None:
    name = 'a <b> & "c"\x00\x1b\ud800\uffff 😀'
    page = svg.document(10, 10, name, [svg.words(0, 0, name), svg.box(0, 0, 1, 1, tooltip=name)])
    root = ElementTree.fromstring(page)
    expected = 'a <b> & "c"\ufffd\ufffd\ufffd\ufffd 😀'
    assert root.attrib["aria-label"] == expected
    assert [e.text for e in root.iter() if e.text and e.text.strip()] == [expected] * 3


def test_what_is_too_long_is_shortened() -> None:
    assert svg.shortened("short", 10, 100) == "short"
    text = svg.shortened("a name that goes on and on", 10, 100)
    assert text.startswith("a name") and text.endswith("…")
    assert svg.text_width(text, 10) <= 100
    assert svg.shortened("none", 10, 0) == "…"
