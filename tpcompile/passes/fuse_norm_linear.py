"""Pass `fuse-norm-linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import LINEAR, NORM_LINEAR, SPECS
from tpcompile.ir.pattern import Call, Number, Optional, Value
from tpcompile.ir.roles import HeadParts
from tpcompile.rewriting.pattern import check
from tpcompile.rewriting.rewrite import Report, absorbed, fuse_each, insert, insert_bound, replace
from tpcompile.rewriting.structure import weight_of

INDEX_SELECT = torch.ops.aten.index_select.default

_NORMED, *_OTHERS = SPECS[NORM_LINEAR].pattern.args
_PICKED = Call(INDEX_SELECT, (_NORMED, Number("dim"), Value("rows", optional=True)))
PATTERN = Call(LINEAR, (Optional(_PICKED), *_OTHERS))


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
    role = value_type(weight_of(linear)).role
    check(
        role is None or isinstance(role, HeadParts),
        linear,
        f"its weight must have no role, got {role}",
        1,
    )
    bindings = absorbed(PATTERN, linear)
    with graph.inserting_before(linear):
        if bindings["rows"] is not None:
            picked = operand(linear)
            along_rows = bindings["dim"] == 0 and value_type(bindings["x"]).dims > 1
            check(along_rows, picked, "it selects along the normed dimension")
            bindings["x"] = insert(picked, INDEX_SELECT, bindings["x"], 0, bindings["rows"])
        new = insert_bound(linear, NORM_LINEAR, bindings)
    replace(linear, new)
    graph.erase_node(linear)
