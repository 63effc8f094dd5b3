"""The shares of the ranks for the page: the layouts of a plan, and the modules of the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tpcompile.ir.layout import Layout
from tpcompile.ir.plan import Plan

_LAYER = re.compile(r"l(\d+)_")


def axes_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the distinct layouts of a plan, with their layers if these differ."""
    users: dict[Layout, list[str]] = {}
    for name, heads in plan.heads.items():
        for layout in (heads.queries, heads.keys):
            users.setdefault(layout, []).append(name)
    for name, layout in plan.ffn.items():
        users.setdefault(layout, []).append(name)
    users.setdefault(plan.vocab, [])
    axes = [layout.axis for layout in users]
    return [
        {
            "axis": layout.axis,
            "units": layout.units,
            "grain": layout.grain,
            "parts": layout.parts,
            "layers": _layers(names) if axes.count(layout.axis) > 1 else "",
        }
        for layout, names in users.items()
    ]


def _layers(names: Iterable[str]) -> str:
    layers = [match[1] for match in map(_LAYER.match, names) if match]
    return f"layers {', '.join(layers)}" if layers else ""


def distinct(sources: Sequence[str]) -> list[str | int]:
    """Return the sources; a copy of an earlier one is replaced by its number."""
    first: dict[str, int] = {}
    entries: list[str | int] = []
    for rank, source in enumerate(sources):
        known = first.setdefault(source, rank)
        entries.append(source if known == rank else known)
    return entries
