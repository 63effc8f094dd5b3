"""Pass `insert-collectives`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.meta import operand, placement_of
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, REDISTRIBUTE
from tpcompile.ir.types import Partial, Shard
from tpcompile.rewriting.rewrite import Report, calls, insert, replace


@dataclass(frozen=True)
class InsertCollectives:
    """Replace each `redistribute` with the collective that the placement of its operand needs.

    %r = redistribute(%o)    %o Partial(sum)         →    %r = all_reduce(%o)
    %g = redistribute(%l)    %l Shard(1, vocab)      →    %g = all_gather(%l, dim=1)
    """

    name: ClassVar[str] = "insert-collectives"

    def apply(self, gm: fx.GraphModule) -> Report:
        nodes = calls(gm, REDISTRIBUTE)
        for node in nodes:
            source = operand(node)
            replace(node, _collective(node, source))
            gm.graph.erase_node(node)
        return Report(matches=len(nodes))


def _collective(node: fx.Node, source: fx.Node) -> fx.Node:
    placement = placement_of(source)
    with node.graph.inserting_before(node):
        if isinstance(placement, Partial):
            return insert(node, ALL_REDUCE, *node.args)
        if isinstance(placement, Shard):
            return insert(node, ALL_GATHER, source, placement.dim)
    return source
