"""Pass `fuse-norm-gate-up`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from tpcompile.ir.activations import OtherMlp, activations
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import LINEAR, NORM_MLPS, NORM_MLPS_APART, SWIGLU, Activation
from tpcompile.rewriting.pattern import check, matches
from tpcompile.rewriting.rewrite import Report, calls, fuse_at, fuse_call

_NEAR = 100
"""A depth above that of any other refusal: no other fusion can absorb the MLP either."""


@dataclass(frozen=True)
class FuseNormGateUp:
    """Fuse the norm, the gate and up projections and the activation into one op.

    %n = tpc.rms_norm(%x, %g)
    %gate, %up = split(linear(%n, %w))     →     %s = tpc.norm_gate_up_swiglu(%x, %g, %w)
    %s = tpc.swiglu(%gate, %up)

    An MLP with another activation, or without a gate, becomes an op such as `tpc.norm_up_relu2`.
    If gate and up are separate linears, for example of weights in different formats, the op is one
    such as `tpc.norm_gate_and_up_silu`, which has two weights.
    """

    name: ClassVar[str] = "fuse-norm-gate-up"

    def apply(self, gm: fx.GraphModule) -> Report:
        sites = [(node, partial(_fuse_swiglu, gm.graph, node)) for node in calls(gm, SWIGLU)]
        other_sites = ((mlp.result, partial(_fuse, gm.graph, mlp)) for mlp in activations(gm.graph))
        return fuse_at(gm, [*sites, *other_sites])


def _fuse_swiglu(graph: fx.Graph, node: fx.Node) -> None:
    fuse_call(_target(Activation.SILU, operand(node), operand(node, 1)), graph, node)


def _fuse(graph: fx.Graph, mlp: OtherMlp) -> None:
    gated = len(mlp.projections) == 2
    matched = [member for member in Activation if matches(member.pattern(gated), mlp.result)]
    check(matched, mlp.node, mlp.unsupported, _NEAR)
    fuse_call(_target(matched[0], *mlp.projections), graph, mlp.result)


def _target(activation: Activation, *projections: fx.Node) -> Any:
    """Return the op of an MLP with these projections, which are parts of one linear or linears."""
    gated = len(projections) == 2
    if gated and projections[0].target is LINEAR:
        return NORM_MLPS_APART[activation]
    return NORM_MLPS[activation, gated]
