"""Pass `fuse-qkv`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import fx

from tpcompile.errors import ShardingError
from tpcompile.ir.ops import ATTENTION
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report, calls, drop_unused_parameters, fuse_at
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
        if not calls(gm, ATTENTION):
            return Report()
        try:
            blocks = attention_blocks(gm.graph)
        except ShardingError as error:  # the heads do not come from separate linears
            return Report(nearest=MissError(None, str(error)))
        report = fuse_at(
            gm,
            (
                (block.attention, partial(fuse_linears, gm, [block.query, block.key, block.value]))
                for block in blocks
            ),
        )
        drop_unused_parameters(gm)
        return report
