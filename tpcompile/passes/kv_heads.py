"""Pass `kv-heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.passes.rewrite import Report
from tpcompile.passes.shard_linears import plan_of, split_rows
from tpcompile.passes.structure import attention_blocks


@dataclass(frozen=True)
class KvHeads:
    """Keep on each rank only the KV heads that its query heads read.

        %k = linear(%n, %wk)    wk f32[32, 64] Replicate
        %a = attention(%q, %k, %v, …)      →      wk f32[32:16|32|16, 64] Shard(0, kv_heads)

    A KV head is on every rank that reads it, so parts overlap where tp does not divide the
    groups. Until this pass every rank computes all KV heads, which is right but wasteful.
    """

    name: ClassVar[str] = "kv-heads"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        plan = plan_of(gm)
        if plan.tp == 1:
            return report
        for block in attention_blocks(gm.graph):
            width = value_type(block.attention).shape[-1]
            assert isinstance(width, int)
            layout = plan.heads_of(block.attention).keys.with_grain(width)
            report.matches += split_rows(block.key, layout) + split_rows(block.value, layout)
        return report
