"""Why passes refused a node: kept on it, for whoever cannot go on because of it."""

from __future__ import annotations

from torch import fx

_REFUSALS = "refusals"


def keep_refusal(node: fx.Node, depth: int, reason: str) -> None:
    """Note why a fusion refused a node; `depth` says how near it came."""
    node.meta[_REFUSALS] = (*refusals_of(node), (depth, reason))


def pass_refusals_on(old: fx.Node, new: fx.Node) -> None:
    """What was said of a node holds for the one that stands in its place."""
    if refusals_of(old):
        new.meta[_REFUSALS] = (*refusals_of(old), *refusals_of(new))


def refusals_of(node: fx.Node) -> tuple[tuple[int, str], ...]:
    """Return the refusals of a node, each with how near it came to a match."""
    found: tuple[tuple[int, str], ...] = node.meta.get(_REFUSALS, ())
    return found
