"""The reasons why passes refused a node, stored on the node for later error messages."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

_REFUSALS = "refusals"


class Refusal(NamedTuple):
    """A reason why a fusion refused a node; a larger `depth` is closer to a match."""

    depth: int
    reason: str
    pass_name: str = ""
    """The pass, once it has run."""

    def __str__(self) -> str:
        subject = self.reason if self.reason.startswith("%") else f"it: {self.reason}"
        return f"{self.pass_name or 'a pass'} refused {subject}"


def keep_refusal(node: fx.Node, depth: int, reason: str) -> None:
    """Record why a fusion refused a node."""
    node.meta[_REFUSALS] = (*refusals_of(node), Refusal(depth, reason))


def pass_refusals_on(old: fx.Node, new: fx.Node) -> None:
    """Copy the refusals of a node to the node that replaces it."""
    if refusals_of(old):
        new.meta[_REFUSALS] = (*refusals_of(old), *refusals_of(new))


def name_refusals(graph: fx.Graph, pass_name: str) -> None:
    """Record the pass that has refused nodes since the last pass."""
    for node in graph.nodes:
        known = refusals_of(node)
        if not all(refusal.pass_name for refusal in known):
            node.meta[_REFUSALS] = tuple(
                r if r.pass_name else r._replace(pass_name=pass_name) for r in known
            )


def refusals_of(node: fx.Node) -> tuple[Refusal, ...]:
    """Return the refusals of a node."""
    refusals: tuple[Refusal, ...] = node.meta.get(_REFUSALS, ())
    return refusals
