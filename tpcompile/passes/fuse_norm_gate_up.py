"""Pass `fuse-norm-gate-up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.activations import activations
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report, fuse_calls

_NEAR = 100
"""A depth above that of any other refusal: no other fusion can absorb the MLP either."""


@dataclass(frozen=True)
class FuseNormGateUp:
    """Fuse the norm, the gate and up projections and the activation into one op.

    %n = tpc.rms_norm(%x, %g)
    %gate, %up = split(linear(%n, %w))     →     %s = tpc.norm_gate_up_swiglu(%x, %g, %w)
    %s = tpc.swiglu(%gate, %up)
    """

    name: ClassVar[str] = "fuse-norm-gate-up"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = fuse_calls(gm, NORM_GATE_UP_SWIGLU)
        for other in activations(gm.graph):
            report.miss(MissError(other.node, other.unsupported, _NEAR), other.result)
        return report
