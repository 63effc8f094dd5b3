"""Sums across ranks and across the splits of a projection, which are added to the residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import fx

from tpcompile.ir.ops import ADD_RESIDUAL, ALL_REDUCE, ALL_REDUCE_RESIDUAL
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.vm.groups.residual import TERMS_SITE, Site, residual_buffer
from tpcompile.vm.lowering.building import Building, layer_of, width_of
from tpcompile.vm.lowering.handlers import lowers, reads_terms
from tpcompile.vm.program import rules
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Parts,
    Probe,
    Range,
    StepInstruction,
    unseen,
    with_bias,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values
from tpcompile.vm.targets import Target


def _by_site(embedding: rules.Rule, half: rules.Rule) -> dict[Site, rules.Rule]:
    return {site: embedding if site == Site.EMBEDDING else half for site in Site}


_TERMS = (":slots*batch", "columns")
_FIRST_TERMS = rules.scratch("held*batch", "width", dtype=rules.F32, each_rank=True).reads(*_TERMS)
"""The embedding has one term per rank. It is in the MLP's buffer, which may hold more terms."""
_RESIDUAL = rules.scratch("batch", "width", dtype="T").reads(":", "columns")
_ALL_TERMS = rules.scratch("slots*batch", "width", dtype=rules.F32, each_rank=True).reads(*_TERMS)


@dataclass(frozen=True)
class SumOperands:
    """The terms of all ranks, in consecutive buffers, and the residual that they are added to."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    site: Site
    terms: Annotated[int, rules.Chosen("site", _by_site(_FIRST_TERMS, _ALL_TERMS))]
    ranks: Annotated[int, rules.RANKS]
    slots: Annotated[int, rules.Chosen("site", _by_site(rules.Number(1, "1"), rules.COUNT))]
    bias: Annotated[int, rules.maybe(rules.weight("width").reads("columns"))]
    residual: Annotated[int, rules.Chosen("site", _by_site(rules.Missing(), _RESIDUAL))]
    out: Annotated[int, rules.scratch("batch", "width", dtype="T").writes(":", "columns")]
    batch: Annotated[int, rules.COUNT]


@instruction
@dataclass(frozen=True)
class AllReduce(StepInstruction):
    """Some columns of the sum over all ranks, in a fixed tree, plus the residual once."""

    at: SumOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "all_reduce"
    opcode: ClassVar[int] = 8

    @property
    def traffic(self) -> int:
        """The bytes of the terms of one rank; the terms of several are exchanged over a link."""
        return self._term_bytes if self.at.ranks == 1 else 0

    @property
    def _term_bytes(self) -> int:
        """The bytes of all terms, which are fp32."""
        return 4 * self.at.ranks * self.at.slots * self.at.batch * self.columns.extent

    @property
    def values(self) -> int:
        return self._term_bytes // 4

    def parts(self, target: Target) -> Parts:
        """Estimate the time. Terms of other ranks use a link, which few workers use at a time."""
        parts = super().parts(target)
        if self.at.ranks == 1:
            return parts
        foreign = self._term_bytes - self._term_bytes // self.at.ranks
        exchange = target.exchange_us + foreign / target.link_bytes_per_us
        return parts._replace(fixed_us=parts.fixed_us + exchange)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, columns = self.at, self.columns.slice
        terms: list[torch.Tensor] = []
        for rank in range(operands.ranks):
            held = memory[operands.terms + rank][: operands.slots * operands.batch, columns]
            terms += held.view(operands.slots, operands.batch, -1).unbind(0)
        if operands.site == Site.EXPERTS:  # slots one after the other, not ranks
            terms = [
                term for slot in range(operands.slots) for term in terms[slot :: operands.slots]
            ]
        sums = with_bias(memory, operands.bias, self.columns, fold_tree(terms, torch.add))
        if operands.residual != NONE:
            sums = memory[operands.residual][:, columns].float() + sums
        memory[operands.out][:, columns] = sums.to(memory[operands.out].dtype)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        slots = [
            Range(slot * operands.batch, (slot + 1) * operands.batch)
            for slot in range(operands.slots)
        ]
        terms = [
            values.part("terms", slot, rank=rank)
            for rank in range(operands.ranks)
            for slot in slots
        ]
        bias, residual = values["bias"], values["residual"]
        total = values.call("sum", *terms, *([] if bias is None else [bias]))
        yield Result("out", total if residual is None else ADD_RESIDUAL(total, residual))

    def report(self, memory: Memory, probe: Probe) -> None:
        values = memory[self.at.out][:, self.columns.slice]
        probe(self.at.site.group, Range(0, self.at.batch), self.columns, values)


@lowers(ALL_REDUCE, where=reads_terms)
def all_reduce(builder: Building, node: fx.Node) -> None:
    """Lower the sum of all ranks' embedding rows."""
    (terms,) = node.all_input_nodes
    sum_terms(builder, node, builder.buffer(terms, 0), None, None)


@lowers(ALL_REDUCE_RESIDUAL)
def all_reduce_residual(builder: Building, node: fx.Node) -> None:
    """Lower the sum of all ranks' terms, added to the residual."""
    bound = builder.bound(node)
    sum_terms(builder, node, builder.buffer(bound["partial"], 0), bound["residual"], bound["bias"])


def sum_terms(
    builder: Building, node: fx.Node, terms: int, residual: fx.Node | None, bias: fx.Node | None
) -> None:
    out = residual_buffer(builder, node, residual)
    builder.put(node, out)
    site = Site.EMBEDDING if residual is None else TERMS_SITE[builder.buffers[terms].name]
    slots = 1 if site == Site.EMBEDDING else builder.buffers[terms].shape[0] // builder.plan.batch
    for rank in range(builder.ranks):
        operands = SumOperands(
            rank=rank,
            layer=layer_of(node),
            site=site,
            terms=terms,
            ranks=builder.ranks,
            slots=slots,
            bias=builder.buffer_if(bias, rank),
            residual=builder.buffer_if(residual, rank),
            out=out + rank,
            batch=builder.plan.batch,
        )
        builder.instructions += [
            AllReduce(operands, columns) for columns in builder.plan.sums(width_of(node))
        ]
