"""Tests of the elements of SVG pictures."""

from __future__ import annotations

from itertools import combinations
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
        found = svg.ticks(0.0, 1.37**exponent, 10)
        assert 4 <= len(found) <= 11


def test_whatever_a_name_holds_is_xml() -> None:
    name = 'a <b> & "c"\x00\x1b\ud800\uffff 😀'
    page = svg.document(10, 10, name, [svg.words(0, 0, name), svg.box(0, 0, 1, 1, tooltip=name)])
    root = ElementTree.fromstring(page)
    expected = 'a <b> & "c"\ufffd\ufffd\ufffd\ufffd 😀'
    assert root.attrib["aria-label"] == expected
    assert [e.text for e in root.iter() if e.text and e.text.strip()] == [expected] * 3


def test_ten_colours_that_black_can_be_read_on() -> None:
    found = list(svg.colours("abcdefghij").values())
    assert len(set(found)) == 10
    for colour in found:
        assert contrast(colour, svg.INK) > 5
    for one, other in combinations(found, 2):
        assert sum(abs(a - b) for a, b in zip(channels(one), channels(other), strict=True)) > 60
    assert svg.colours("abcdefghijk")["k"] == found[0]


def test_what_is_too_long_is_shortened() -> None:
    assert svg.shortened("short", 10, 100) == "short"
    found = svg.shortened("a name that goes on and on", 10, 100)
    assert found.startswith("a name") and found.endswith("…")
    assert svg.text_width(found, 10) <= 100
    assert svg.shortened("none", 10, 0) == "…"


def channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio as defined by the Web Content Accessibility Guidelines."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [value / 255 for value in channels(colour)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
