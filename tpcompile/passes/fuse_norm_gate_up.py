"""Pass `fuse-norm-gate-up`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import fx

from tpcompile.ir.activations import OtherMlp, activations
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU, NORM_MLPS, SWIGLU, Activation
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
    """

    name: ClassVar[str] = "fuse-norm-gate-up"

    def apply(self, gm: fx.GraphModule) -> Report:
        swiglu = partial(fuse_call, NORM_GATE_UP_SWIGLU, gm.graph)
        sites = [(node, partial(swiglu, node)) for node in calls(gm, SWIGLU)]
        others = ((mlp.result, partial(_fuse, gm.graph, mlp)) for mlp in activations(gm.graph))
        return fuse_at(gm, [*sites, *others])


def _fuse(graph: fx.Graph, mlp: OtherMlp) -> None:
    gated = len(mlp.projections) == 2
    found = [one for one in Activation if matches(one.pattern(gated), mlp.result)]
    check(found, mlp.node, mlp.unsupported, _NEAR)
    fuse_call(NORM_MLPS[found[0], gated], graph, mlp.result)
