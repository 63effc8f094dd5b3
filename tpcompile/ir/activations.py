"""MLPs with an activation other than SwiGLU: `down(act(gate) * up)` and `down(act(up))`.

They are found by data flow. An activation may consist of several ops, for example a GELU that a
model spells out, so an MLP is a region of elementwise ops. The region starts at one or two
projections, contains an activation, and ends at the linear that reads its result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import ACTIVATIONS, ELEMENTWISE, LINEAR, Activation, op_name

_PROJECTIONS = (LINEAR, operator.getitem)
"""A projection is a linear, or one part of a fused linear."""


@dataclass(frozen=True)
class OtherMlp:
    """The elementwise region of an MLP that is not `tpc.swiglu`."""

    node: fx.Node
    """The non-linear op."""
    result: fx.Node
    """The value that the down projection reads."""
    projections: tuple[fx.Node, ...]
    """The inputs of the region: gate and up in this order, or up alone."""

    @property
    def unsupported(self) -> str:
        """The reason why a program cannot contain this MLP, if no `Activation` matches it."""
        known = ", ".join(activation.name.lower() for activation in Activation)
        return (
            f"the MLP's activation is {op_name(self.node)}; programs support only {known}, "
            "torch modules support more"
        )


def activations(graph: fx.Graph) -> list[OtherMlp]:
    """Return the MLPs of a graph that are not `tpc.swiglu`, in graph order."""
    calls = [node for node in graph.nodes if node.target in ACTIVATIONS]
    mlps = {a.result: a for a in map(_activation, calls) if a is not None}
    return list(mlps.values())


def _activation(node: fx.Node) -> OtherMlp | None:
    result = _result(node)
    if result is None:
        return None
    projections = _sources(node, result)
    known = all(source.target in _PROJECTIONS for source in projections)
    return OtherMlp(node, result, projections) if known and len(projections) <= 2 else None


def _result(node: fx.Node) -> fx.Node | None:
    """Return the last elementwise op after `node`, if one linear reads it as its input."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is LINEAR:
            return node if operand(user) is node else None
        if user.target not in ELEMENTWISE:
            return None
        node = user
    return None


def _sources(*nodes: fx.Node) -> tuple[fx.Node, ...]:
    """Return the values from which elementwise ops compute `nodes`, in the order of `nodes`."""
    visited: dict[fx.Node, None] = {}
    for node in nodes:
        ahead = [node]
        while ahead:
            current = ahead.pop()
            if current not in visited:
                visited[current] = None
                ahead += current.all_input_nodes if current.target in ELEMENTWISE else []
    return tuple(node for node in visited if node.target not in ELEMENTWISE)
