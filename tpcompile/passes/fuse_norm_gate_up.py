"""Pass `fuse-norm-gate-up`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.activations import activations
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU, SWIGLU
from tpcompile.rewriting.absorb import check_absorbed, normed_linear, way_back
from tpcompile.rewriting.pattern import Call, MissError, Number, Value, match
from tpcompile.rewriting.rewrite import Report, fuse_each, insert, replace

aten = torch.ops.aten

_GATE, _UP = (Call(operator.getitem, (Value("split"), part)) for part in (0, 1))
PATTERN = Call(SWIGLU, (_GATE, _UP))
_SPLIT = Call(aten.split_with_sizes.default, (Value("rows"), [Number("gate"), Number("up")], 1))

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
        report = fuse_each(gm, SWIGLU, _fuse)
        for other in activations(gm.graph):
            report.miss(MissError(other.node, other.unsupported, _NEAR), other.result)
        return report


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    linear: fx.Node = match(_SPLIT, match(PATTERN, node)["split"])["rows"]
    source = normed_linear(linear)
    gate, up = operand(node), operand(node, 1)
    inside = {*way_back(gate, operand(linear)), up}
    check_absorbed(inside, node)
    *operands, bias = source
    with graph.inserting_before(node):
        new = insert(node, NORM_GATE_UP_SWIGLU, *operands, *([bias] if bias else []))
    replace(node, new)
    graph.erase_node(node)
