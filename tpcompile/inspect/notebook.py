"""HTML for notebooks: graphs whose lines are coloured by placement, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torch import fx

from tpcompile.ir.meta import type_of
from tpcompile.ir.text.printer import Printer, section_of
from tpcompile.ir.types import Partial, Replicate, Shard, ValueType

_COLOURS = {Replicate: "#7f9dc9", Shard: "#e0862c", Partial: "#c9506a"}
"""The colour at the left of a line, by placement. It is legible on light and dark notebooks."""
_LINE = "border-left: 4px solid {}; padding-left: 6px; white-space: pre"


def graph_html(gm: fx.GraphModule, title: str) -> str:
    """Return the lines of a graph, with each layer folded, coloured by placement."""
    printer = Printer(origins=False)
    parts: list[str] = []
    section = ""
    for node in gm.graph.nodes:
        heading = section_of(node)
        if heading != section:
            parts.append("</details>" if section else "")
            state = "" if heading.startswith("layer ") else " open"
            parts.append(f"<details{state}><summary>{escape(heading)}</summary>")
            section = heading
        kind = type_of(node) if "type" in node.meta else None
        placement = type(kind.placement) if isinstance(kind, ValueType) else None
        colour = _COLOURS.get(placement, "transparent") if placement else "transparent"
        parts.append(f'<div style="{_LINE.format(colour)}">{escape(printer.node(node))}</div>')
    legend = " ".join(
        f'<span style="{_LINE.format(colour)}">{kind.__name__}</span>'
        for kind, colour in _COLOURS.items()
    )
    body = "".join(parts) + ("</details>" if section else "")
    return (
        f'<div><b>{escape(title)}</b> {legend}<div style="font-family: monospace; '
        f'overflow-x: auto; max-height: 40em">{body}</div></div>'
    )


def table_html(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    row = f"<tr>{head}</tr>" if headings else ""
    return f"<table><caption>{escape(title)}</caption>{row}{body}</table>"
