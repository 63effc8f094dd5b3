"""Pass `raise-swiglu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.activations import activations
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import EXPERTS, SPECS, SWIGLU
from tpcompile.rewriting.pattern import Bindings, check
from tpcompile.rewriting.rewrite import Report, insert, rewrite


@dataclass(frozen=True)
class RaiseSwiglu:
    """Recognise the gated activation of the MLP.

    %s = silu(%gate)
    %y = %s * %up       →   %y = tpc.swiglu(%gate, %up)

    An MLP with another activation, or without a gate, keeps its elementwise ops.
    """

    name: ClassVar[str] = "raise-swiglu"
    before: ClassVar[tuple[str, ...]] = ("fuse-norm-gate-up",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = rewrite(gm, SPECS[SWIGLU].pattern, _replacement)
        if activations(gm.graph):
            return report
        return report.require(gm, "SwiGLU", SWIGLU, EXPERTS)


def _replacement(node: fx.Node, bindings: Bindings) -> fx.Node:
    gate, up = bindings["gate"], bindings["up"]
    check(
        value_type(gate).shape == value_type(up).shape, node, "gate and up must have the same shape"
    )
    return insert(node, SWIGLU, gate, up)
