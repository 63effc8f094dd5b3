"""Leftovers of a decode step's fusions: nodes that no instruction implements."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import op_name, package_of
from tpcompile.ir.refusals import Refusal, refusals_of
from tpcompile.ir.text import format_node
from tpcompile.vm.lowering.handlers import HANDLERS


@dataclass(frozen=True)
class Leftover:
    """A node that should be part of an instruction group, and the reason why it is not."""

    node: fx.Node
    reason: str
    refused: bool = True
    """Whether a fusion refused it. If none did, the passes were not those of a decode step."""

    @property
    def hint(self) -> str:
        package = package_of(self.node)
        if package:
            return (
                f"{op_name(self.node)} is an op of the package {package}, which must add an "
                "instruction for it with @lowers, or remove it before the last passes"
            )
        if self.refused:
            return (
                "tpcompile does not support this form of the model's computation, or a pass has "
                "changed the form"
            )
        return "Lower the graph after all passes of the decode pipeline (-p decode)"

    def __str__(self) -> str:
        return f"{format_node(self.node)}: {self.reason}"


def leftovers(gm: fx.GraphModule) -> list[Leftover]:
    """Return the nodes that no instruction group contains, in order; a complete graph has none."""
    nodes = {
        node: None
        for node in gm.graph.nodes
        if node.op.startswith("call") and not _is_consumed(node)
    }
    return [_leftover(node, nodes) for node in nodes]


def verify_nothing_left(gm: fx.GraphModule) -> None:
    """Raise `UnsupportedError` if a graph has nodes that no instruction implements."""
    left_over = leftovers(gm)
    if not left_over:
        return
    first, remaining = next(filter(_of_plugin, left_over), left_over[0]), left_over[1:]
    more = f" ({len(remaining)} more nodes are left over)" if remaining else ""
    raise UnsupportedError(
        f"%{first.node.name} is not part of any decode instruction: {first.reason}{more}",
        where=str(origin_of(first.node)),
        got=format_node(first.node),
        expected="a graph of instruction groups, as decode_pipeline produces",
        hint=first.hint,
    )


def _of_plugin(leftover: Leftover) -> bool:
    """Return whether the op is that of a plugin, which explains why its neighbours are left too."""
    return bool(package_of(leftover.node))


def _leftover(node: fx.Node, left: dict[fx.Node, None]) -> Leftover:
    """Return a leftover with the refusal that came nearest to a match.

    The refusal is one of the node or of a node that depends on it, because a fusion starts from
    its last node and collects the nodes before it.
    """
    ahead, visited = [node], {node}
    refusals: list[Refusal] = []
    for current in ahead:
        refusals += refusals_of(current)
        new = [user for user in current.users if user in left and user not in visited]
        ahead += new
        visited |= set(new)
    if not refusals:
        return Leftover(node, "no decode fusion considered it", refused=False)
    nearest = max(reversed(refusals), key=attrgetter("depth"))  # of ties, the last one
    return Leftover(node, str(nearest))


def _is_consumed(node: fx.Node) -> bool:
    handler = HANDLERS.get(node.target)
    return handler is not None and handler.fits(node)
