"""Pass `vocab-parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.meta import parameter_of, placement_of, set_parameter
from tpcompile.ir.ops import EMBEDDING, REDISTRIBUTE, VOCAB_EMBEDDING
from tpcompile.ir.types import REPLICATE
from tpcompile.passes.rewrite import Report, insert, insert_after, replace
from tpcompile.passes.shard_linears import plan_of, split_rows
from tpcompile.passes.structure import embedding_of, head_of, weight_of


@dataclass(frozen=True)
class VocabParallel:
    """Split embedding and head by vocabulary; tied weights stay one parameter.

        %e = embedding(%w, %ids)        %e = tpc.vocab_embedding(%w, %ids)    w Shard(0, vocab)
                                   →    %r = redistribute(%e)
        %l = linear(%x, %w)             %l = linear(%x, %w)
                                        %g = redistribute(%l)
    """

    name: ClassVar[str] = "vocab-parallel"

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        plan = plan_of(gm)
        if plan.tp == 1:
            return report
        embedding, head = embedding_of(gm.graph), head_of(gm.graph)
        if embedding.target is EMBEDDING:
            table, ids = embedding.args[:2]
            assert isinstance(table, fx.Node)
            set_parameter(table, parameter_of(table).sharded(0, plan.vocab))
            with gm.graph.inserting_before(embedding):
                partial = insert(embedding, VOCAB_EMBEDDING, table, ids)
                whole = insert(embedding, REDISTRIBUTE, partial)
            replace(embedding, whole)
            gm.graph.erase_node(embedding)
            report.matches += 1
        if not _gathered(head):
            if placement_of(weight_of(head)) == REPLICATE:
                split_rows(head, plan.vocab)
            replace(head, insert_after(head, REDISTRIBUTE, head))
            report.matches += 1
        return report


def _gathered(head: fx.Node) -> bool:
    """Whether the logits leave the head through a collective already."""
    return all(user.op != "output" for user in head.users)
