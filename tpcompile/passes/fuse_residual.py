"""Pass `fuse-residual`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_REDUCE, ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL
from tpcompile.ir.types import Partial
from tpcompile.rewriting.absorb import check_absorbed
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, replace
from tpcompile.rewriting.structure import bias_of, weight_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseResidual:
    """Add a projection to the residual as it is computed, or as its terms are summed.

    %o = linear(%a, %w)               →     %h = tpc.linear_residual(%a, %w, None, %x)
    %h = %x + %o

    %r = all_reduce(%o, dtype=f32)
    %s = %x + %r                      →     %h = tpc.all_reduce_residual(%o, %x)
    %h = to(%s, dtype=bf16)

    A bias that is added to the sum, before the residual is, goes along.
    """

    name: ClassVar[str] = "fuse-residual"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for node in calls(gm, aten.add.Tensor):
            readers = {user.target for user in node.users}
            if _sum_and_bias(node) is not None and aten.add.Tensor in readers:
                continue  # it goes along with the addition that reads it
            try:
                _fuse(gm.graph, node)
                report.matches += 1
            except MissError as miss:
                report.miss(miss, node)
        drop_dead(gm.graph)
        return report


def _fuse(graph: fx.Graph, added: fx.Node) -> None:
    residual, projected = _terms(added)
    check_absorbed([projected], added)
    if projected.target is LINEAR:
        last = added
        _check_alike(added, residual, projected)
        placement = value_type(projected).placement
        check(not isinstance(placement, Partial), projected, "its terms are not summed yet")
        target = LINEAR_RESIDUAL
        operands = [operand(projected), weight_of(projected), bias_of(projected), residual]
    else:
        total, bias = _sum_and_bias(projected) or (projected, None)
        partial = operand(total)
        last = _rounded(added, residual, projected)
        _check_alike(added, residual, partial)
        check_absorbed({partial, total, projected}, added)
        target = ALL_REDUCE_RESIDUAL
        operands = [partial, residual, *([] if bias is None else [bias])]
    with graph.inserting_before(last):
        new = insert(added, target, *operands)
    replace(last, new)


def _terms(added: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The residual, and what is projected: by habit the second."""
    for projected, residual in (added.args[1::-1], added.args[:2]):
        if isinstance(projected, fx.Node) and _is_projected(projected):
            check(isinstance(residual, fx.Node) and not added.kwargs, added, "it adds a number")
            assert isinstance(residual, fx.Node)
            check(projected is not residual, added, "it adds a projection to itself")
            return residual, projected
    raise MissError(added, "it adds no projection", 0)


def _is_projected(node: fx.Node) -> bool:
    return node.target in (LINEAR, ALL_REDUCE) or _sum_and_bias(node) is not None


def _sum_and_bias(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two terms of a node that adds a bias to a sum across ranks."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    for total, bias in (node.args[:2], node.args[1::-1]):
        if not (isinstance(total, fx.Node) and isinstance(bias, fx.Node)):
            return None
        if total.target is ALL_REDUCE and value_type(bias).dims == 1:
            return total, bias
    return None


def _check_alike(added: fx.Node, residual: fx.Node, projected: fx.Node) -> None:
    kinds = [value_type(node) for node in (residual, projected)]
    alike = len({(kind.shape, kind.dtype) for kind in kinds}) == 1
    check(alike, added, f"its terms differ: {kinds[0]} and {kinds[1]}")


def _rounded(added: fx.Node, residual: fx.Node, total: fx.Node) -> fx.Node:
    """The sum in the residual's dtype: itself, or the cast that alone reads it."""
    dtype = value_type(residual).dtype
    wide = torch.promote_types(dtype, torch.float32)
    check(value_type(total).dtype == wide, total, f"its terms are not summed in {wide}")
    if dtype == wide:
        return added
    for user in added.users:
        rounds = user.target is aten.to.dtype and value_type(user).dtype == dtype
        check(rounds, added, f"%{user.name} reads the sum before it is rounded")
    check(len(added.users) == 1, added, "it is not rounded once")
    return next(iter(added.users))
