"""Ordering rules of passes, used to explain why a pass refused a graph.

The class variable `after` of a pass lists the passes that make the nodes it matches, and `before`
the passes that absorb these nodes. The rules explain refusals; they do not restrict the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def order_refusal(current: Any, done: Sequence[str]) -> str:
    """Return the ordering rules that the passes in `done` violate, as text, or an empty string."""
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
