"""Pass `fuse-delta`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import fx

from tpcompile.errors import ShardingError
from tpcompile.ir.ops import GATED_DELTA_RULE
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report, calls, drop_unused_parameters, fuse_at
from tpcompile.rewriting.structure import delta_blocks


@dataclass(frozen=True)
class FuseDelta:
    """Compute the inputs of linear attention with two linears, one for the gates of heads.

    %x = linear(%n, %wx)           %f = linear(%n, %w)    w = wx ++ wz on each rank
    %z = linear(%n, %wz)           %x, %z = split_with_sizes(%f, [256, 96], dim=1)
    %b = linear(%n, %wb)      →    %g = linear(%n, %v)    v = wb ++ wa on each rank
    %a = linear(%n, %wa)           %b, %a = split_with_sizes(%g, [6, 6], dim=1)

    The gates have a row per head, which checkpoints in few bits often keep in 16 bits. Linears of
    weights in different formats stay separate.
    """

    name: ClassVar[str] = "fuse-delta"
    after: ClassVar[tuple[str, ...]] = ("raise-gates", "plan-sharding", "shard-linears")

    def apply(self, gm: fx.GraphModule) -> Report:
        if not calls(gm, GATED_DELTA_RULE):
            return Report()
        try:
            sites = list(_sites(gm))
        except ShardingError as error:  # its inputs do not come from separate linears
            return Report(nearest=MissError(None, str(error)))
        report = fuse_at(gm, sites)
        drop_unused_parameters(gm)
        return report


def _sites(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Callable[[], None]]]:
    for block in delta_blocks(gm.graph):
        yield block.rule, partial(fuse_linears, gm, [block.inputs, block.gate])
        yield block.rule, partial(fuse_linears, gm, [block.beta, block.a])
