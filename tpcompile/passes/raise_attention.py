"""Pass `raise-attention`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import fx

from tpcompile.errors import UnsupportedError
from tpcompile.ir.info import model_of
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import ATTENTION, RMS_NORM, ROPE, ROPE_PAIRS, op_name
from tpcompile.passes.canonicalize import cancel_transposes
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, replace
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

    A norm of transposed heads is moved before the transpose.
    """

    name: ClassVar[str] = "raise-attention"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-norm", "raise-rope")
    before: ClassVar[tuple[str, ...]] = ("cache-kv",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        _normalise_first(gm.graph)
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
    *ops, origin = head_ops(heads)
    for reader, node in pairwise(ops):
        if reader.target is RMS_NORM and node.target in (ROPE, ROPE_PAIRS):
            raise UnsupportedError(
                f"{model_of(origin.graph)} normalises heads after it rotates them, so its results "
                "depend on where a prompt begins",
                where=str(origin_of(reader)),
                expected="a norm before the rotation, as in Qwen3",
            )
    check(
        origin.target is aten.unflatten.int,
        origin,
        f"heads come from {op_name(origin)}, not from a projection that is split into heads",
    )


def _normalise_first(graph: fx.Graph) -> None:
    """Move norms of heads before the transposes that they follow, which changes no value."""
    for norm in [node for node in graph.nodes if node.target is RMS_NORM]:
        heads = operand(norm)
        if heads.target is not aten.transpose.int or {*heads.args[1:]} != {0, 1}:
            continue
        with graph.inserting_before(norm):
            normed = insert(norm, RMS_NORM, heads.args[0], *norm.args[1:])
            replace(norm, insert(norm, aten.transpose.int, normed, 0, 1))
    drop_dead(graph)
