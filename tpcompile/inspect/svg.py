"""Pieces of a picture as SVG text: rectangles, words, colours, round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

INK, QUIET, PAPER, GRID = "#1a1a1a", "#5f6368", "#ffffff", "#d9dce1"

_COLOURS = (
    # Paul Tol's "light", which colour-blind people can tell apart and black can be read on
    "#dddddd",
    "#77aadd",
    "#eedd88",
    "#aaaa00",
    "#ee8866",
    "#44bb99",
    "#ffaabb",
    "#99ddff",
    "#bbcc33",
    "#c8a27c",
)
_CHARACTER, _NARROW = 0.66, 0.4
"""The width of a character as part of the size of its font, rather too wide than too narrow."""


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour each; they begin again behind the tenth."""
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}


def text_width(text: str, size: float) -> float:
    narrow = sum(mark in " ijlftIr.,:;'|()[]" for mark in text)
    return size * (narrow * _NARROW + (len(text) - narrow) * _CHARACTER)


def shortened(text: str, size: float, width: float) -> str:
    """The text, or as much of its beginning as has room."""
    if text_width(text, size) <= width:
        return text
    room = int(width / (size * _CHARACTER)) - 1
    return text[: max(room, 0)].rstrip() + "…"


def words(
    x: float,
    y: float,
    text: str,
    size: float = 12,
    *,
    anchor: str = "start",
    fill: str = INK,
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{_short(x)}" y="{_short(y)}" font-size="{_short(size)}"'
    return f'<text {place} text-anchor="{anchor}" fill="{fill}"{weight}>{visible(text)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    more: str = "",
    *,
    fill: str = "",
    tooltip: str = "",
) -> str:
    """A rectangle; `fill` may be left to the group around it."""
    sides = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
    paint = f' fill="{fill}"' if fill else ""
    inside = f"><title>{visible(tooltip)}</title></rect>" if tooltip else "/>"
    return f"<rect {sides}{paint}{' ' + more if more else ''}{inside}"


def line(x: float, top: float, bottom: float, colour: str = GRID) -> str:
    ends = f'x1="{_short(x)}" y1="{_short(top)}" x2="{_short(x)}" y2="{_short(bottom)}"'
    return f'<line {ends} stroke="{colour}"/>'


def group(attributes: str, parts: Iterable[str]) -> str:
    return f"<g {attributes}>\n" + "\n".join(parts) + "\n</g>"


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole file; the title is what a reader of the page is told that it shows."""
    size = f"{_short(width)} {_short(height)}".split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label={quoteattr(_legal(title))} '
        'font-family="DejaVu Sans, Verdana, sans-serif">\n'
        f"<title>{visible(title)}</title>\n"
        + "\n".join([box(0, 0, width, height, fill=PAPER), *parts])
        + "\n</svg>\n"
    )


def ticks(start: float, stop: float, most: int) -> list[float]:
    """About `most` round numbers from `start` to `stop`: 1, 2 or 5 times a power of ten apart."""
    if stop <= start:
        return [start]
    least = (stop - start) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= least * (1 - 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(stop / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def visible(text: str) -> str:
    """Escaped, and without what XML cannot hold."""
    return escape(_legal(text))


def _legal(text: str) -> str:
    return "".join(
        mark if mark in "\t\n\r" or " " <= mark < "\ud800" or "\ue000" <= mark < "\ufffe"
        or mark > "\uffff" else "\ufffd" for mark in text
    )  # fmt: skip


def _short(number: float) -> str:
    return f"{number:.1f}".rstrip("0").rstrip(".")
