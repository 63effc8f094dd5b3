"""The parts of a picture as SVG text: rectangles, words, colours and axis ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

INK, QUIET, PAPER, GRID = "#1a1a1a", "#5f6368", "#ffffff", "#d9dce1"

_CHARACTER, _NARROW = 0.66, 0.4
"""The width of a character as a fraction of the font size; overestimated to be safe."""


def text_width(text: str, size: float) -> float:
    narrow = sum(mark in " ijlftIr.,:;'|()[]" for mark in text)
    return size * (narrow * _NARROW + (len(text) - narrow) * _CHARACTER)


def shortened(text: str, size: float, width: float) -> str:
    """Return the text, cut off with an ellipsis if it is too wide."""
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
    """Return a rectangle. Without `fill` it has the colour of the enclosing group."""
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
    """Return a whole SVG file. The title is also its accessible label."""
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
    """Return about `most` numbers from `start` to `stop`, 1, 2 or 5 times a power of ten apart."""
    if stop <= start:
        return [start]
    least = (stop - start) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= least * (1 - 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(stop / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def visible(text: str) -> str:
    """Escape the text, and replace characters that XML does not allow."""
    return escape(_legal(text))


def _legal(text: str) -> str:
    return "".join(
        mark if mark in "\t\n\r" or " " <= mark < "\ud800" or "\ue000" <= mark < "\ufffe"
        or mark > "\uffff" else "\ufffd" for mark in text
    )  # fmt: skip


def _short(number: float) -> str:
    return f"{number:.1f}".rstrip("0").rstrip(".")
