"""What the fusions of a decode step left: nodes that no instruction of a program stands for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import origin_of
from tpcompile.ir.refusals import refusals_of
from tpcompile.ir.text import format_node
from tpcompile.vm.lowering.handlers import HANDLERS


@dataclass(frozen=True)
class Leftover:
    """A node that should have become part of an instruction group, and why it did not."""

    node: fx.Node
    reason: str
    refused: bool = True
    """Whether a fusion looked at it; if none did, the passes were not those of a decode step."""

    @property
    def hint(self) -> str:
        if self.refused:
            return "The model does this in another way than those that tpcompile knows"
        return "Lower what decode_pipeline (-p decode) makes of the model"

    def __str__(self) -> str:
        return f"{format_node(self.node)}: {self.reason}"


def leftovers(gm: fx.GraphModule) -> list[Leftover]:
    """The nodes of a decode graph that are no instruction group, in order; of a good one none."""
    found = {
        node: None
        for node in gm.graph.nodes
        if node.op.startswith("call") and not _is_consumed(node)
    }
    return [_leftover(node, found) for node in found]


def verify_nothing_left(gm: fx.GraphModule) -> None:
    """Raise `UnsupportedError` if a graph has nodes that no instruction stands for."""
    found = leftovers(gm)
    if not found:
        return
    first, *others = found
    more = f" ({len(others)} more nodes are left)" if others else ""
    raise UnsupportedError(
        f"%{first.node.name} belongs to no instruction of a decode step: {first.reason}{more}",
        where=str(origin_of(first.node)),
        got=format_node(first.node),
        expected="a graph whose nodes are instruction groups, as decode_pipeline makes them",
        hint=first.hint,
    )


def _leftover(node: fx.Node, left: dict[fx.Node, None]) -> Leftover:
    """With the refusal that came nearest to a match, of the node itself or of what it leads to: a
    fusion looks for its last node, and takes in those before."""
    ahead, seen = [node], {node}
    said: list[tuple[int, str]] = []
    for current in ahead:
        said += refusals_of(current)
        new = [user for user in current.users if user in left and user not in seen]
        ahead += new
        seen |= set(new)
    if not said:
        return Leftover(node, "no fusion of a decode step looked at it", refused=False)
    _, nearest = max(reversed(said), key=lambda refusal: refusal[0])  # of several the furthest on
    return Leftover(node, nearest)


def _is_consumed(node: fx.Node) -> bool:
    handler = HANDLERS.get(node.target)
    return handler is not None and handler.fits(node)
