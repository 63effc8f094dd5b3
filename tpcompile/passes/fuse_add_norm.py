"""Pass `fuse-add-norm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ADD_RMS_NORM, RMS_NORM
from tpcompile.ir.ops.norm import NORM_BEFORE_ROUNDING
from tpcompile.ir.types import ValueType
from tpcompile.ir.values.scope import Rewrite
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, insert_item, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseAddNorm:
    """Fuse the residual addition and the RMS norm of the sum into one op.

    %h = %x + %o
    %n = tpc.rms_norm(%h, %w)     →     %n, %h = tpc.add_rms_norm(%x, %o, %w)
    …  = %h + …
    """

    name: ClassVar[str] = "fuse-add-norm"
    rewrites: ClassVar[tuple[Rewrite, ...]] = (NORM_BEFORE_ROUNDING,)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        order = {node: place for place, node in enumerate(gm.graph.nodes)}
        for norm in calls(gm, RMS_NORM):
            try:
                _fuse(gm.graph, norm, order)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)  # `fuse_each` would store it on a norm that other passes fuse
        drop_dead(gm.graph)
        return report


def _fuse(graph: fx.Graph, norm: fx.Node, order: dict[fx.Node, int]) -> None:
    total, *scale = norm.args
    assert isinstance(total, fx.Node)
    added = operand(total) if total.target is aten.to.dtype else total
    check(added.target is aten.add.Tensor, norm, "its input is not a sum", 1)
    x, residual = _terms(added, value_type(total))
    for value in {added, total}:
        early = [user for user in value.users if user is not total and order[user] < order[norm]]
        check(not early, value, f"%{early[0].name if early else ''} reads the sum before the norm")
    check(
        added is total or len(added.users) == 1,
        added,
        "another node reads the sum before it is rounded",
    )
    with graph.inserting_before(norm):
        fused = insert(norm, ADD_RMS_NORM, x, residual, *scale)
        normed = insert_item(norm, fused, 0, "normed")
        new_total = insert_item(norm, fused, 1, "residual")
    replace(norm, normed)
    replace(total, new_total)
    order.update({normed: order[norm], new_total: order[norm], fused: order[norm]})


def _terms(added: fx.Node, kind: ValueType) -> tuple[fx.Node, fx.Node]:
    """Return the two terms; the first has the dtype of the rounded sum."""
    x, residual = added.args[:2]
    are_nodes = isinstance(x, fx.Node) and isinstance(residual, fx.Node)
    check(are_nodes and not added.kwargs, added, "it is not a plain sum of two values")
    assert isinstance(x, fx.Node) and isinstance(residual, fx.Node)
    same = value_type(x).shape == value_type(residual).shape
    check(same, added, "its terms must have the same shape")
    if value_type(x).dtype != kind.dtype:
        x, residual = residual, x
    check(value_type(x).dtype == kind.dtype, added, "neither term has the dtype of the sum")
    return x, residual
