"""Pass `fuse-add-norm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ADD_RMS_NORM, RMS_NORM
from tpcompile.passes.pattern import MissError, check
from tpcompile.passes.rewrite import Report, calls, drop_dead, insert, insert_item, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAddNorm:
    """Add to the residual and norm the sum in one op.

        %h = %x + %o
        %n = tpc.rms_norm(%h, %w)     →     %n, %h = tpc.add_rms_norm(%x, %o, %w)
        …  = %h + …
    """

    name: ClassVar[str] = "fuse-add-norm"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        order = {node: place for place, node in enumerate(gm.graph.nodes)}
        for norm in calls(gm, RMS_NORM):
            try:
                _fuse(gm.graph, norm, order)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        drop_dead(gm.graph)
        return report


def _fuse(graph: fx.Graph, norm: fx.Node, order: dict[fx.Node, int]) -> None:
    total, weight, eps = norm.args
    assert isinstance(total, fx.Node)
    check(total.target is aten.add.Tensor, norm, "it norms no sum", 1)
    x, residual = total.args[:2]
    both = isinstance(x, fx.Node) and isinstance(residual, fx.Node)
    check(both and not total.kwargs, total, "it adds no two values")
    assert isinstance(x, fx.Node) and isinstance(residual, fx.Node)
    check(value_type(x).shape == value_type(residual).shape, total, "its terms differ in shape")
    early = [user for user in total.users if order.get(user, len(order)) < order[norm]]
    check(not early, total, f"%{early[0].name if early else ''} reads the sum before the norm")
    with graph.inserting_before(norm):
        fused = insert(norm, ADD_RMS_NORM, x, residual, weight, eps)
        normed = insert_item(norm, fused, 0, "normed")
        added = insert_item(norm, fused, 1, "residual")
    replace(norm, normed)
    replace(total, added)
