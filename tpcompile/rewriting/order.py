"""Ordering rules of passes, used to explain why a pass refused a graph.

A pass names the passes that make the nodes that it looks for in its class variable `after`, and
those that absorb these nodes in `before`. The rules only explain refusals. They do not restrict the
order: a pass runs on every graph that fits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def order_refusal(current: Any, done: Sequence[str]) -> str:
    """Return the ordering rules that a pass breaks after the passes in `done`, if any, as text."""
    missing = [other for other in getattr(current, "after", ()) if other not in done]
    early = [other for other in getattr(current, "before", ()) if other in done]
    wants = [
        f"{word} {_listed(others)}"
        for word, others in (("after", missing), ("before", early))
        if others
    ]
    return f"{current.name} must run {' and '.join(wants)}." if wants else ""


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
