"""Pass `vocab-parallel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import parameter_of, placement_of, set_parameter, value_type
from tpcompile.ir.ops import COLLECTIVES, EMBEDDING, REDISTRIBUTE, VOCAB_EMBEDDING
from tpcompile.ir.plan import plan_axis
from tpcompile.ir.types import REPLICATE
from tpcompile.passes.shard_linears import plan_of
from tpcompile.rewriting.rewrite import Report, insert, insert_after, replace
from tpcompile.rewriting.structure import bias_of, embedding_of, head_of, weight_of


@dataclass(frozen=True)
class VocabParallel:
    """Shard the embedding and the LM head by vocabulary; tied weights stay one parameter.

    %e = embedding(%w, %ids)        %e = tpc.vocab_embedding(%w, %ids)    w Shard(0, vocab)
                               →    %r = redistribute(%e)
    %l = linear(%x, %w)             %l = linear(%x, %w)
                                    %g = redistribute(%l)
    """

    name: ClassVar[str] = "vocab-parallel"
    after: ClassVar[tuple[str, ...]] = ("plan-sharding",)
    before: ClassVar[tuple[str, ...]] = ("fuse-norm-linear",)

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
        if not any(user.target in COLLECTIVES for user in head.users):
            _split_head(head, plan.vocab)
            replace(head, insert_after(head, REDISTRIBUTE, head))
            report.matches += 1
        return report


def _split_head(head: fx.Node, layout: Layout) -> None:
    """Shard the head by rows; a tied weight is already sharded."""
    weight = value_type(weight_of(head))
    if weight.shape[0] != layout.size:
        layout = plan_axis("vocab", int(weight.shape[0]), layout.ranks)
    for node in (weight_of(head), bias_of(head)):
        if node is not None and placement_of(node) == REPLICATE:
            set_parameter(node, parameter_of(node).sharded(0, layout))
