"""Pass `fuse-qkv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.errors import ShardingError
from tpcompile.ir.ops import ATTENTION
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, drop_unused_parameters
from tpcompile.rewriting.structure import attention_blocks


@dataclass(frozen=True)
class FuseQkv:
    """Compute queries, keys and values with one linear.

    %q = linear(%n, %wq)
    %k = linear(%n, %wk)       →    %f = linear(%n, %w)    w = wq ++ wk ++ wv on each rank
    %v = linear(%n, %wv)            %q, %k, %v = split_with_sizes(%f, [96, 32, 32], dim=1)
    """

    name: ClassVar[str] = "fuse-qkv"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        if not calls(gm, ATTENTION):
            return report
        try:
            blocks = attention_blocks(gm.graph)
        except ShardingError as error:  # the heads do not come from separate linears
            report.miss(MissError(None, str(error)))
            return report
        for block in blocks:
            try:
                fuse_linears(gm, [block.query, block.key, block.value])
                report.matches += 1
            except MissError as miss:
                report.miss(miss, block.attention)
        drop_dead(gm.graph)
        drop_unused_parameters(gm)
        return report
