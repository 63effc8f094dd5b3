"""Pass `split-attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION_REDUCE, CACHED_ATTENTION, PARTIAL_ATTENTION, arguments_of
from tpcompile.ir.values.attending import SPANS_MERGED
from tpcompile.ir.values.scope import Rewrite
from tpcompile.rewriting.rewrite import Report, calls, insert, insert_bound, insert_item, replace


@dataclass(frozen=True)
class SplitAttention:
    """Compute attention separately for each span of a sequence's blocks, and merge the results.

                                                 %p = tpc.partial_attention(%q, %cache, …, spans=2)
    %a = tpc.cached_attention(%q, %cache, …)  →  %values, %lse = %p
                                                 %a = tpc.attention_reduce(%values, %lse)
    """

    name: ClassVar[str] = "split-attention"
    rewrites: ClassVar[tuple[Rewrite, ...]] = (SPANS_MERGED,)
    spans: int = 1
    """Number of spans into which a sequence is split."""

    def apply(self, gm: fx.GraphModule) -> Report:
        if self.spans < 1:
            raise UsageError(f"spans must be at least 1, got {self.spans}")
        attentions = calls(gm, CACHED_ATTENTION)
        for node in attentions:
            operands = {**arguments_of(node), "spans": self.spans}
            with gm.graph.inserting_before(node):
                partial = insert_bound(node, PARTIAL_ATTENTION, operands)
                values = insert_item(node, partial, 0, "values")
                lse = insert_item(node, partial, 1, "lse")
                mixed = insert(node, ATTENTION_REDUCE, values, lse, value_type(node).dtype)
            replace(node, mixed)
            gm.graph.erase_node(node)
        return Report(matches=len(attentions))
