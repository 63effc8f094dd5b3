"""Pass `raise-attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.info import model_of
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import ATTENTION, RMS_NORM, op_name
from tpcompile.passes.canonicalize import cancel_transposes
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls
from tpcompile.rewriting.structure import head_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class RaiseAttention:
    """Put every attention in token-major form: heads come from their projection untransposed.

    %a = transpose(%q, 0, 1)
    %b = transpose(%a, 0, 1)
    %r = tpc.rope(%b, %cos, %sin)       →   %r = tpc.rope(%q, %cos, %sin)
    %c = transpose(%r, 0, 1)                %o = tpc.attention(%r, …)
    %d = transpose(%c, 0, 1)
    %o = tpc.attention(%d, …)
    """

    name: ClassVar[str] = "raise-attention"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-norm", "raise-rope")
    before: ClassVar[tuple[str, ...]] = ("cache-kv",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        cancel_transposes(gm.graph)
        for node in calls(gm, ATTENTION):
            try:
                for place in range(3):
                    _check_token_major(operand(node, place))
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        if report.matches < len(calls(gm, ATTENTION)):
            report.matches = 0
        return report.require(gm, "attention in token-major form")


def _check_token_major(heads: fx.Node) -> None:
    """Check that the features of a projection are split into heads without other ops between."""
    origin = head_ops(heads)[-1]
    _refuse_transposed_norm(origin)
    check(
        origin.target is aten.unflatten.int,
        origin,
        f"heads come from {op_name(origin)}, not from a projection that is split into heads",
    )


def _refuse_transposed_norm(origin: fx.Node) -> None:
    """Refuse a norm over heads between two transposes."""
    norm = operand(origin) if origin.target is aten.transpose.int else origin
    if norm.target is RMS_NORM and operand(norm).target is aten.transpose.int:
        raise UnsupportedError(
            f"{model_of(origin.graph)} transposes heads before it normalises them",
            where=str(origin_of(norm)),
            expected="a per-head norm before the transpose, as in Qwen3",
        )
