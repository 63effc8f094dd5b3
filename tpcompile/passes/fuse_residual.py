"""Pass `fuse-residual`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_REDUCE, ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL
from tpcompile.ir.types import Partial
from tpcompile.rewriting.absorb import check_absorbed
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls, fuse_at, insert, replace
from tpcompile.rewriting.structure import bias_of, weight_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseResidual:
    """Fuse a residual addition into the projection or all-reduce that it reads.

    %o = linear(%a, %w)               →     %h = tpc.linear_residual(%a, %w, None, %x)
    %h = %x + %o

    %r = all_reduce(%o, dtype=f32)
    %s = %x + %r                      →     %h = tpc.all_reduce_residual(%o, %x)
    %h = to(%s, dtype=bf16)

    A bias that is added before the residual becomes an operand of the fused op.
    """

    name: ClassVar[str] = "fuse-residual"

    def apply(self, gm: fx.GraphModule) -> Report:
        return fuse_at(gm, _sites(gm))


def _sites(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Callable[[], None]]]:
    for node in calls(gm, aten.add.Tensor):
        readers = {user.target for user in node.users}
        if _sum_and_bias(node) is None or aten.add.Tensor not in readers:
            yield node, partial(_fuse, gm.graph, node)
        # otherwise the residual addition absorbs it


def _fuse(graph: fx.Graph, added: fx.Node) -> None:
    residual, projected = _terms(added)
    check_absorbed([projected], added)
    if projected.target is LINEAR:
        last = added
        _check_alike(added, residual, projected)
        placement = value_type(projected).placement
        check(
            not isinstance(placement, Partial),
            projected,
            "its result is partial and must be reduced first",
        )
        target = LINEAR_RESIDUAL
        operands = [operand(projected), weight_of(projected), bias_of(projected), residual]
    else:
        total, bias = _sum_and_bias(projected) or (projected, None)
        summed = operand(total)
        last = _rounded(added, residual, projected)
        _check_alike(added, residual, summed)
        check_absorbed({summed, total, projected}, added)
        target = ALL_REDUCE_RESIDUAL
        operands = [summed, residual, *([] if bias is None else [bias])]
    with graph.inserting_before(last):
        new = insert(added, target, *operands)
    replace(last, new)


def _terms(added: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the residual and the projection, which is usually the second term."""
    for projected, residual in (added.args[1::-1], added.args[:2]):
        if isinstance(projected, fx.Node) and _is_projected(projected):
            check(
                isinstance(residual, fx.Node) and not added.kwargs,
                added,
                "it is not a plain sum of two values",
            )
            assert isinstance(residual, fx.Node)
            check(projected is not residual, added, "it adds a projection to itself")
            return residual, projected
    raise MissError(added, "neither term is a projection", 0)


def _is_projected(node: fx.Node) -> bool:
    return node.target in (LINEAR, ALL_REDUCE) or _sum_and_bias(node) is not None


def _sum_and_bias(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the sum across ranks and the bias that the node adds to it, or None."""
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
    check(
        alike, added, f"its terms must have the same shape and dtype, got {kinds[0]} and {kinds[1]}"
    )


def _rounded(added: fx.Node, residual: fx.Node, total: fx.Node) -> fx.Node:
    """Return the sum in the residual's dtype: `added`, or the cast that is its only reader."""
    dtype = value_type(residual).dtype
    wide = torch.promote_types(dtype, torch.float32)
    check(value_type(total).dtype == wide, total, f"its terms must be summed in {wide}")
    if dtype == wide:
        return added
    for user in added.users:
        rounds = user.target is aten.to.dtype and value_type(user).dtype == dtype
        check(rounds, added, f"%{user.name} reads the sum before it is rounded")
    check(len(added.users) == 1, added, "exactly one cast must round it")
    return next(iter(added.users))
