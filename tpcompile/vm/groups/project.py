"""Projections that are added to the residual: on one rank at once, on several behind a sum.

The columns are split into leaves whose sums are added in a fixed tree; a rank, or a worker with
some of the columns, has a subtree of it. So the bits are the same however many share the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, ClassVar

import torch

from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.vm.groups.arithmetic import leaf_dots
from tpcompile.vm.program import Region, rules
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    columns_of,
    present,
    unseen,
    with_bias,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.targets import Target


class Site(IntEnum):
    """What is added: where the residual comes from, or the end of one half of a layer."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2

    @property
    def group(self) -> str:
        """What the sum is called where values are compared."""
        return "embedding" if self == Site.EMBEDDING else f"{self.name.lower()}_residual"


@dataclass(frozen=True)
class ProjectOperands:
    """`x[batch, width]` times a weight; the residual is missing where only terms are made."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    site: Site
    x: Annotated[int, rules.scratch("batch", "width", dtype="T")]
    weight: Annotated[int, rules.weight("all_rows", "width", dtype="T")]
    bias: int
    residual: int
    out: int
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    leaves: Annotated[int, rules.Number(1, "width")]
    item: Annotated[int, rules.ItemOf("weight")]


@instruction
@dataclass(frozen=True)
class LinearResidual(StepInstruction):
    """Some rows of a projection, added to the residual."""

    at: Annotated[
        ProjectOperands,
        {
            "bias": rules.maybe(rules.weight("all_rows", dtype="T")),
            "residual": rules.scratch("batch", "all_rows", dtype="R"),
            "out": rules.scratch("batch", "all_rows", dtype="R"),
        },
    ]
    rows: Annotated[Range, rules.Within("all_rows")]
    name: ClassVar[str] = "linear_residual"
    opcode: ClassVar[int] = 6

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        at = self.at
        return (
            columns_of(at.x, at.batch, Range(0, at.width)),
            Region(at.weight, (self.rows, (0, at.width))),
            columns_of(at.residual, at.batch, self.rows),
            *present(Region(at.bias, (self.rows,))),
        )

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return (columns_of(self.at.out, self.at.batch, self.rows),)

    @property
    def traffic(self) -> int:
        return self.rows.extent * self.at.width * self.at.item

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        at = self.at
        found = leaf_dots(memory[at.x], memory[at.weight][self.rows.slice], at.leaves)
        found = with_bias(memory, at.bias, self.rows, found)
        found = memory[at.residual][:, self.rows.slice].float() + found
        memory[at.out][:, self.rows.slice] = found.to(memory[at.out].dtype)
        probe(at.site.group, Range(0, at.batch), self.rows, found)


@instruction
@dataclass(frozen=True)
class LinearTerms(StepInstruction):
    """Some rows and some columns of a projection: one term of each sum, in a place of its own."""

    at: Annotated[
        ProjectOperands,
        {
            "bias": rules.Missing(),
            "residual": rules.Missing(),
            "out": rules.scratch("slots*batch", "all_rows", dtype=rules.F32),
        },
    ]
    rows: Annotated[Range, rules.Within("all_rows")]
    columns: Annotated[Range, rules.Within("width", "leaves")]
    slot: Annotated[int, rules.Number(0, "slots - 1")]
    leaves: Annotated[int, rules.Number(1, "width")]
    """Those that lie in the columns."""
    name: ClassVar[str] = "linear_terms"
    opcode: ClassVar[int] = 7

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        at = self.at
        return (
            columns_of(at.x, at.batch, self.columns),
            Region(at.weight, (self.rows, self.columns)),
        )

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return (Region(self.at.out, (self._terms, self.rows)),)

    @property
    def _terms(self) -> Range:
        return Range(self.slot * self.at.batch, (self.slot + 1) * self.at.batch)

    @property
    def traffic(self) -> int:
        return self.rows.extent * self.columns.extent * self.at.item

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        x = memory[self.at.x][:, self.columns.slice]
        weight = memory[self.at.weight][self.rows.slice, self.columns.slice]
        found = leaf_dots(x, weight, self.leaves)
        memory[self.at.out][self._terms.slice, self.rows.slice] = found


def _by_site(embedding: rules.Rule, half: rules.Rule) -> dict[Site, rules.Rule]:
    return {site: embedding if site == Site.EMBEDDING else half for site in Site}


_FIRST_TERMS = rules.scratch("held*batch", "width", dtype=rules.F32, each_rank=True)
"""The embedding has one term on each rank, in the buffer that the MLP has more for."""
_ALL_TERMS = rules.scratch("slots*batch", "width", dtype=rules.F32, each_rank=True)


@dataclass(frozen=True)
class SumOperands:
    """The terms of all ranks, whose buffers follow each other, and what they are added to."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    site: Site
    terms: Annotated[int, rules.Chosen("site", _by_site(_FIRST_TERMS, _ALL_TERMS))]
    ranks: Annotated[int, rules.RANKS]
    slots: Annotated[int, rules.Chosen("site", _by_site(rules.Number(1, "1"), rules.COUNT))]
    bias: Annotated[int, rules.maybe(rules.weight("width"))]
    residual: Annotated[int, rules.maybe(rules.scratch("batch", "width", dtype="T"))]
    out: Annotated[int, rules.scratch("batch", "width", dtype="T")]
    batch: Annotated[int, rules.COUNT]


@instruction
@dataclass(frozen=True)
class AllReduce(StepInstruction):
    """Some columns of the sum over all ranks, in a fixed tree, and the residual once."""

    at: SumOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "all_reduce"
    opcode: ClassVar[int] = 8

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        at = self.at
        terms = ((0, at.slots * at.batch), self.columns)
        return (
            *(Region(at.terms + rank, terms) for rank in range(at.ranks)),
            *present(
                Region(at.bias, (self.columns,)), columns_of(at.residual, at.batch, self.columns)
            ),
        )

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return (columns_of(self.at.out, self.at.batch, self.columns),)

    @property
    def traffic(self) -> int:
        """Terms are in fp32."""
        return 4 * self.at.ranks * self.at.slots * self.at.batch * self.columns.extent

    def cost(self, target: Target) -> float:
        """Terms of other ranks come over a link, which few workers use at a time."""
        if self.at.ranks == 1:
            return super().cost(target)
        foreign = self.traffic - self.traffic // self.at.ranks
        exchange = target.exchange_us + foreign / target.link_bytes_per_us
        return target.instruction_us + exchange

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        at = self.at
        terms: list[torch.Tensor] = []
        for rank in range(at.ranks):
            held = memory[at.terms + rank][: at.slots * at.batch, self.columns.slice]
            terms += held.view(at.slots, at.batch, -1).unbind(0)
        found = with_bias(memory, at.bias, self.columns, fold_tree(terms, torch.add))
        if at.residual != NONE:
            found = memory[at.residual][:, self.columns.slice].float() + found
        memory[at.out][:, self.columns.slice] = found.to(memory[at.out].dtype)
        probe(at.site.group, Range(0, at.batch), self.columns, found)
