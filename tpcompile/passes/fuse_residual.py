"""Pass `fuse-residual`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ALL_REDUCE_RESIDUAL, LINEAR_RESIDUAL, SPECS, arguments_of
from tpcompile.ir.pattern import Call
from tpcompile.ir.types import Partial
from tpcompile.rewriting.pattern import Bindings, MissError, check, match, match_calls
from tpcompile.rewriting.rewrite import (
    Report,
    calls,
    check_absorbed,
    fuse_at,
    insert_bound,
    replace,
)

aten = torch.ops.aten

_PROJECTED = SPECS[LINEAR_RESIDUAL].pattern
_SUMMED = SPECS[ALL_REDUCE_RESIDUAL].pattern.args[0]
"""The sum before it is rounded; fp32 is not rounded."""
_BIASED = _SUMMED.args[1].call


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
        if aten.add.Tensor not in readers or not _adds_bias(node):
            yield node, partial(_fuse, gm.graph, node)
        # otherwise the residual addition absorbs it


def _adds_bias(node: fx.Node) -> bool:
    """Return whether the node adds a bias to a sum across ranks."""
    with suppress(MissError):
        return value_type(match(_BIASED, node)["bias"]).dims == 1
    return False


def _fuse(graph: fx.Graph, added: fx.Node) -> None:
    target, bindings, (_, *inside) = _matched(added)
    last, residual = added, bindings["residual"]
    check(residual not in inside, added, "it adds a projection to itself")
    check_absorbed(inside, added)
    if target is LINEAR_RESIDUAL:
        (projected,) = inside
        _check_alike(added, residual, projected)
        reduced = not isinstance(value_type(projected).placement, Partial)
        check(reduced, projected, "its result is partial and must be reduced first")
    else:
        last = _rounded(added, residual, inside[0])
        _check_alike(added, residual, bindings["partial"])
        check_absorbed([bindings["partial"]], *inside)
    with graph.inserting_before(last):
        new = insert_bound(added, target, bindings)
    replace(last, new)


def _matched(added: fx.Node) -> tuple[Any, Bindings, list[fx.Node]]:
    """Return the op whose body ends in the addition, its arguments, and the calls of its body."""
    left, right, *_ = arguments_of(added).values()
    are_nodes = isinstance(left, fx.Node) and isinstance(right, fx.Node)
    check(are_nodes, added, "it is not a plain sum of two values", 1)
    for target, pattern in ((LINEAR_RESIDUAL, _PROJECTED), (ALL_REDUCE_RESIDUAL, _SUMMED)):
        for args in (pattern.args, pattern.args[::-1]):
            with suppress(MissError):
                bindings, nodes = match_calls(Call(pattern.target, args), added)
                if bindings["bias"] is None or value_type(bindings["bias"]).dims == 1:
                    return target, bindings, nodes
    raise MissError(added, "neither term is a projection", 0)


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
