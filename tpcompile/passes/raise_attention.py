"""Pass `raise-attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION, op_name
from tpcompile.passes.pattern import MissError, check
from tpcompile.passes.rewrite import Report, calls, drop_dead
from tpcompile.passes.structure import head_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class RaiseAttention:
    """Bring every attention to token-major form: heads come from their projection untransposed.

        %a = transpose(%q, 0, 1)
        %b = transpose(%a, 0, 1)
        %r = tpc.rope(%b, %cos, %sin)       →   %r = tpc.rope(%q, %cos, %sin)
        %c = transpose(%r, 0, 1)                %o = tpc.attention(%r, …)
        %d = transpose(%c, 0, 1)
        %o = tpc.attention(%d, …)
    """

    name: ClassVar[str] = "raise-attention"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for node in list(gm.graph.nodes):
            inner = _untransposed(node)
            if inner is not None:
                node.replace_all_uses_with(inner)
        drop_dead(gm.graph)
        for node in calls(gm, ATTENTION):
            try:
                for operand in node.args[:3]:
                    _check_token_major(operand)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        if report.matches < len(calls(gm, ATTENTION)):
            report.matches = 0
        return report.require(gm, "attention in token-major form")


def _untransposed(node: fx.Node) -> fx.Node | None:
    """The value that a pair of transposes gives back."""
    if node.target is not aten.transpose.int:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.transpose.int:
        return None
    rank = value_type(node).rank
    swapped = [{d % rank for d in pair.args[1:]} for pair in (node, source)]  # type: ignore[operator]
    inner = source.args[0]
    return inner if swapped[0] == swapped[1] and isinstance(inner, fx.Node) else None


def _check_token_major(operand: object) -> None:
    """A head axis must be cut from the features of one projection, right after it."""
    assert isinstance(operand, fx.Node)
    origin = head_ops(operand)[-1]
    check(origin.target is aten.unflatten.int, origin,
          f"heads come from {op_name(origin)}, not from a projection cut into heads")
