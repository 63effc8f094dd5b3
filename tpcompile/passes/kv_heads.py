"""Pass `kv-heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.meta import origin_of, placement_of, value_type
from tpcompile.ir.text import format_node
from tpcompile.ir.types import REPLICATE
from tpcompile.passes.shard_linears import ShardLinears, plan_of, split_rows
from tpcompile.rewriting.rewrite import Report
from tpcompile.rewriting.structure import AttentionBlock, attention_blocks, weight_of


@dataclass(frozen=True)
class KvHeads:
    """Keep on each rank only the KV heads that its query heads read.

        %k = linear(%n, %wk)    wk f32[32, 64] Replicate
        %a = attention(%q, %k, %v, …)      →      wk f32[32:16|32|16, 64] Shard(0, kv_heads)

    Every rank that reads a KV head has a copy, so parts overlap where tp does not divide the
    groups. Before this pass every rank computes all KV heads, which is correct but wasteful.
    """

    name: ClassVar[str] = "kv-heads"
    after: ClassVar[tuple[str, ...]] = ("plan-sharding", "shard-linears")
    before: ClassVar[tuple[str, ...]] = ShardLinears.before

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        plan = plan_of(gm)
        if plan.tp == 1:
            return report
        blocks = attention_blocks(gm.graph)
        for block in blocks:
            _check_queries_split(block)
        for block in blocks:
            width = value_type(block.attention).extent(-1)
            layout = plan.heads_of(block.attention).keys.with_grain(width)
            report.matches += split_rows(block.key, layout) + split_rows(block.value, layout)
        return report


def _check_queries_split(block: AttentionBlock) -> None:
    """Check that query heads are sharded: they determine the KV heads of a rank."""
    weight = weight_of(block.query)
    if placement_of(weight) == REPLICATE:
        raise PassError(
            "KV heads cannot be sharded before query heads",
            where=str(origin_of(block.query)),
            got=format_node(weight),
            expected="sharded query heads, or a pipeline without kv-heads",
        )
