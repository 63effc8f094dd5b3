"""MLPs whose activation is no SwiGLU, found by data flow: `down(act(gate) * up)`, `down(act(up))`.

The activation may be several ops, as in a GELU that a model writes out, so an MLP is a region of
elementwise ops: from one or two projections, over an activation, to the linear that reads it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import ACTIVATIONS, ELEMENTWISE, LINEAR, op_name

_PROJECTIONS = (LINEAR, operator.getitem)
"""A projection is a linear, or a part of one that was fused."""


@dataclass(frozen=True)
class Activation:
    """The elementwise region of an MLP."""

    node: fx.Node
    """The non-linear op."""
    result: fx.Node
    """What the down projection reads."""
    projections: tuple[fx.Node, ...]
    """What the region reads: the gate and then up, or up alone."""

    @property
    def unsupported(self) -> str:
        """Why there is no program with this MLP."""
        found = op_name(self.node)
        return f"the MLP's activation is {found}; programs support silu(gate) * up, modules more"


def activations(graph: fx.Graph) -> list[Activation]:
    """The MLPs of a graph that are not `tpc.swiglu`, in order."""
    calls = [node for node in graph.nodes if node.target in ACTIVATIONS]
    found = {a.result: a for a in map(_activation, calls) if a is not None}
    return list(found.values())


def _activation(node: fx.Node) -> Activation | None:
    result = _result(node)
    if result is None:
        return None
    projections = _sources(node, result)
    known = all(source.target in _PROJECTIONS for source in projections)
    return Activation(node, result, projections) if known and len(projections) <= 2 else None


def _result(node: fx.Node) -> fx.Node | None:
    """The last elementwise op behind `node`, if it is the input of one linear."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is LINEAR:
            return node if operand(user) is node else None
        if user.target not in ELEMENTWISE:
            return None
        node = user
    return None


def _sources(*nodes: fx.Node) -> tuple[fx.Node, ...]:
    """The values from which elementwise ops compute `nodes`, those of the first node first."""
    seen: dict[fx.Node, None] = {}
    for node in nodes:
        ahead = [node]
        while ahead:
            current = ahead.pop()
            if current not in seen:
                seen[current] = None
                ahead += current.all_input_nodes if current.target in ELEMENTWISE else []
    return tuple(node for node in seen if node.target not in ELEMENTWISE)
