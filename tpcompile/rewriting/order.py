"""The order of passes, which their class variables `after` and `before` declare.

`after` lists the passes that make the nodes that a pass matches, `before` the passes that absorb
these nodes. A pipeline need not have all of them, but those that it has must be in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tpcompile.errors import UsageError


def check_order(passes: Sequence[Any], done: Sequence[Any] = ()) -> None:
    """Raise for the first pass that violates the declared order, given the passes already done."""
    names = [current.name for current in (*done, *passes)]
    for place, current in enumerate(passes, len(done)):
        early = set(names[:place])
        message = _violation(current, set(names[place:]) - early, early)
        if message and current.name not in early:
            raise UsageError(message.removesuffix("."), got=",".join(names))


def order_refusal(current: Any, done: Sequence[str]) -> str:
    """Return the passes that `current` lacks before it or has too early, as text, or ""."""
    return _violation(current, set(getattr(current, "after", ())).difference(done), done)


def _violation(current: Any, missing: Collection[str], early: Collection[str]) -> str:
    wants = [
        f"{word} {_listed(names)}"
        for word, wrong in (("after", missing), ("before", early))
        if (names := [name for name in getattr(current, word, ()) if name in wrong])
    ]
    return f"{current.name} must run {' and '.join(wants)}." if wants else ""


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
