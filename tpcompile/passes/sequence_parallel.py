"""Pass `sequence-parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.info import info_of
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, REDISTRIBUTE, REDUCE_SCATTER, RMS_NORM
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report, calls, insert, insert_after, replace

aten = torch.ops.aten

_PER_TOKEN = (RMS_NORM, aten.add.Tensor, aten.to.dtype)
"""Ops on the residual that process each token on its own."""


@dataclass(frozen=True)
class SequenceParallel:
    """Shard the residual and its norms by tokens between the linears.

    Run it after insert-collectives and before the fusions.

        %r = all_reduce(%o)           %r = reduce_scatter(%o)      Shard(0, tokens)
        %h = %x + %r             →    %h = %x + %r                 Shard(0, tokens)
        %n = rms_norm(%h, %w)         %n = rms_norm(%h, %w)        Shard(0, tokens)
        %q = linear(%n, %wq)          %g = all_gather(%n, dim=0)
                                      %q = linear(%g, %wq)
    """

    name: ClassVar[str] = "sequence-parallel"
    after: ClassVar[tuple[str, ...]] = ("insert-collectives",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for node in calls(gm, REDISTRIBUTE):
            report.miss(MissError(node, "the collective of this redistribute is not chosen yet"))
        scattered: dict[fx.Node, None] = {}
        for node in calls(gm, ALL_REDUCE):
            with gm.graph.inserting_before(node):
                source, *dtype = node.args
                new = insert(node, REDUCE_SCATTER, source, info_of(gm).tp, *dtype)
            replace(node, new)
            gm.graph.erase_node(node)
            scattered[new] = None
            report.matches += 1
        for node in list(gm.graph.nodes):
            if node.target in _PER_TOKEN and _all_scattered(node, scattered):
                scattered[node] = None
        for node in scattered:
            _gather_for_others(node, scattered)
        return report


def _all_scattered(node: fx.Node, scattered: dict[fx.Node, None]) -> bool:
    """Return whether every operand with one row per token is sharded by tokens."""
    tokens = value_type(node).shape[0]
    rows = [n for n in node.all_input_nodes if value_type(n).shape[0] == tokens]
    return all(operand in scattered for operand in rows)


def _gather_for_others(node: fx.Node, scattered: dict[fx.Node, None]) -> None:
    """Gather the value for readers that need every token."""
    readers = [user for user in node.users if user not in scattered]
    if not readers:
        return
    whole = insert_after(node, ALL_GATHER, node, 0)
    whole.meta["type"] = value_type(node)
    for user in readers:
        user.replace_input_with(node, whole)
