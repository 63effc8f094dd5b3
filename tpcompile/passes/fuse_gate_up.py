"""Pass `fuse-gate-up`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import fx

from tpcompile.ir.activations import activations
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import LINEAR, SWIGLU
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import Report, calls, drop_unused_parameters, fuse_at


@dataclass(frozen=True)
class FuseGateUp:
    """Compute gate and up with one linear.

    %g = linear(%n, %wg)            %f = linear(%n, %w)    w = wg ++ wu on each rank
    %u = linear(%n, %wu)       →    %g, %u = split_with_sizes(%f, [176, 176], dim=1)
    %s = swiglu(%g, %u)             %s = swiglu(%g, %u)
    """

    name: ClassVar[str] = "fuse-gate-up"

    def apply(self, gm: fx.GraphModule) -> Report:
        sites = ((node, partial(_fuse, gm, node, inputs)) for node, inputs in _projections(gm))
        report = fuse_at(gm, sites)
        drop_unused_parameters(gm)
        return report


def _fuse(gm: fx.GraphModule, node: fx.Node, projections: tuple[fx.Node, ...]) -> None:
    check(len(projections) == 2, node, "its MLP has no gate", 1)
    gate, up = projections
    for side in (gate, up):
        check(side.target is LINEAR, side, "it is not computed by a linear", 1)
    check(gate is not up, gate, "gate and up are the same linear")
    fuse_linears(gm, [gate, up])


def _projections(gm: fx.GraphModule) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Return each activation with its projections, the gate first."""
    swiglu = [(node, (operand(node), operand(node, 1))) for node in calls(gm, SWIGLU)]
    return [*swiglu, *((a.node, a.projections) for a in activations(gm.graph))]
