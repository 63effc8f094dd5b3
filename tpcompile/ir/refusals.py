"""The reasons why passes refused a node, stored on the node for later error messages."""

from __future__ import annotations

from torch import fx

_REFUSALS = "refusals"


def keep_refusal(node: fx.Node, depth: int, reason: str) -> None:
    """Record why a fusion refused a node; a larger `depth` is closer to a match."""
    node.meta[_REFUSALS] = (*refusals_of(node), (depth, reason))


def pass_refusals_on(old: fx.Node, new: fx.Node) -> None:
    """Copy the refusals of a node to the node that replaces it."""
    if refusals_of(old):
        new.meta[_REFUSALS] = (*refusals_of(old), *refusals_of(new))


def refusals_of(node: fx.Node) -> tuple[tuple[int, str], ...]:
    """Return the refusals of a node, each as (depth, reason)."""
    found: tuple[tuple[int, str], ...] = node.meta.get(_REFUSALS, ())
    return found
