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
from tpcompile.vm.program.meaning import Made, Values
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
        found = super().parts(target)
        if self.at.ranks == 1:
            return found
        foreign = self._term_bytes - self._term_bytes // self.at.ranks
        exchange = target.exchange_us + foreign / target.link_bytes_per_us
        return found._replace(fixed_us=found.fixed_us + exchange)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        at = self.at
        terms: list[torch.Tensor] = []
        for rank in range(at.ranks):
            held = memory[at.terms + rank][: at.slots * at.batch, self.columns.slice]
            terms += held.view(at.slots, at.batch, -1).unbind(0)
        if at.site == Site.EXPERTS:  # slots one after the other, not ranks
            terms = [term for slot in range(at.slots) for term in terms[slot :: at.slots]]
        found = with_bias(memory, at.bias, self.columns, fold_tree(terms, torch.add))
        if at.residual != NONE:
            found = memory[at.residual][:, self.columns.slice].float() + found
        memory[at.out][:, self.columns.slice] = found.to(memory[at.out].dtype)

    def meaning(self, values: Values) -> Iterator[Made]:
        at = self.at
        slots = [Range(slot * at.batch, (slot + 1) * at.batch) for slot in range(at.slots)]
        terms = [values.part("terms", own, rank=rank) for rank in range(at.ranks) for own in slots]
        bias, residual = values["bias"], values["residual"]
        total = values.call("sum", *terms, *([] if bias is None else [bias]))
        yield Made("out", total if residual is None else ADD_RESIDUAL(total, residual))

    def report(self, memory: Memory, probe: Probe) -> None:
        found = memory[self.at.out][:, self.columns.slice]
        probe(self.at.site.group, Range(0, self.at.batch), self.columns, found)


@lowers(ALL_REDUCE, where=reads_terms)
def all_reduce(to: Building, node: fx.Node) -> None:
    """Lower the sum of all ranks' embedding rows."""
    (terms,) = node.all_input_nodes
    sum_terms(to, node, to.where(terms, 0), None, None)


@lowers(ALL_REDUCE_RESIDUAL)
def all_reduce_residual(to: Building, node: fx.Node) -> None:
    """Lower the sum of all ranks' terms, added to the residual."""
    bound = to.bound(node)
    sum_terms(to, node, to.where(bound["partial"], 0), bound["residual"], bound["bias"])


def sum_terms(
    to: Building, node: fx.Node, terms: int, residual: fx.Node | None, bias: fx.Node | None
) -> None:
    out = residual_buffer(to, node, residual)
    to.put(node, out)
    site = Site.EMBEDDING if residual is None else TERMS_SITE[to.buffers[terms].name]
    slots = 1 if site == Site.EMBEDDING else to.buffers[terms].shape[0] // to.plan.batch
    for rank in range(to.ranks):
        at = SumOperands(
            rank=rank,
            layer=layer_of(node),
            site=site,
            terms=terms,
            ranks=to.ranks,
            slots=slots,
            bias=to.where_if(bias, rank),
            residual=to.where_if(residual, rank),
            out=out + rank,
            batch=to.plan.batch,
        )
        to.instructions += [AllReduce(at, columns) for columns in to.plan.sums(width_of(node))]
