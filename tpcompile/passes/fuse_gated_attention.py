"""Pass `fuse-gated-attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import GATED_ATTENTION_REDUCE, SIGMOID_GATE, SPECS
from tpcompile.rewriting.rewrite import Report, absorbed, fuse_each, insert_bound, replace


@dataclass(frozen=True)
class FuseGatedAttention:
    """Multiply attention by its gate where its spans are merged.

    %a = flatten(tpc.attention_reduce(%values, %lse))     →    %y = tpc.gated_attention_reduce(
    %y = tpc.sigmoid_gate(%a, %g)                                  %values, %lse, %g)
    """

    name: ClassVar[str] = "fuse-gated-attention"
    after: ClassVar[tuple[str, ...]] = ("split-attention",)

    def apply(self, gm: fx.GraphModule) -> Report:
        return fuse_each(gm, SIGMOID_GATE, _fuse)


def _fuse(graph: fx.Graph, gated: fx.Node) -> None:
    bindings = absorbed(SPECS[GATED_ATTENTION_REDUCE].pattern, gated)
    with graph.inserting_before(gated):
        bound = {**bindings, "dtype": value_type(gated).dtype}
        new = insert_bound(gated, GATED_ATTENTION_REDUCE, bound)
    replace(gated, new)
    graph.erase_node(gated)
