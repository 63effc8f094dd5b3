"""Pass `fuse-norm-linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import LINEAR, NORM_LINEAR, RMS_NORM
from tpcompile.rewriting.absorb import check_absorbed
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import Report, fuse_each, insert, replace
from tpcompile.rewriting.structure import bias_of, weight_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseNormLinear:
    """Fuse a norm and a linear, as in the LM head, into one op; select rows before the norm.

    %n = tpc.rms_norm(%x, %g)                      %r = index_select(%x, %rows)
    %r = index_select(%n, %rows)             →     %l = tpc.norm_linear(%r, %g, %w)
    %l = linear(%r, %w)
    """

    name: ClassVar[str] = "fuse-norm-linear"

    def apply(self, gm: fx.GraphModule) -> Report:
        return fuse_each(gm, LINEAR, _fuse)


def _fuse(graph: fx.Graph, linear: fx.Node) -> None:
    source = operand(linear)
    picked = source if source.target is aten.index_select.default else None
    norm = operand(source) if picked else source
    check(norm.target is RMS_NORM, linear, f"its input %{norm.name} is not an RMS norm", 1)
    role = value_type(weight_of(linear)).role
    check(role is None, linear, f"its weight must have no role, got {role}", 1)
    check_absorbed([norm, picked] if picked else [norm], linear)
    x, scale, eps = norm.args
    bias = bias_of(linear)
    with graph.inserting_before(linear):
        if picked:
            _, dim, rows = picked.args
            check(
                dim == 0 and value_type(norm).dims > 1,
                picked,
                "it selects along the normed dimension",
            )
            x = insert(picked, aten.index_select.default, x, dim, rows)
        operands = [x, scale, eps, weight_of(linear), *([bias] if bias else [])]
        new = insert(linear, NORM_LINEAR, *operands)
    replace(linear, new)
    graph.erase_node(linear)
