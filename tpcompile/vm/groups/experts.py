"""A mixture of experts: the projections of chosen experts, and the terms of their sum.

The chosen experts are known only within the step. So an instruction reads the choices of all
sequences, and computes its rows of every chosen expert that the rank holds, in the order of their
numbers. The work of a phase is balanced for every choice, and a batch reads each chosen expert
once. Regions name the rows of all experts, and costs are those of the expected
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import (
    ADD_RESIDUAL,
    LINEAR,
    NORM_EXPERTS,
    RMS_NORM,
    SHARED_EXPERT,
)
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.ir.ops.experts import chosen
from tpcompile.vm.groups.arithmetic import leaf_products, leaves_of, sigmoid, swiglu
from tpcompile.vm.groups.normed import NormedOperands, linear, normed
from tpcompile.vm.groups.reduce import sum_terms
from tpcompile.vm.groups.residual import Site, terms_buffer
from tpcompile.vm.groups.router import IDS
from tpcompile.vm.lowering.building import Building, layer_of, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Format, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    WeightInstruction,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


def _rows_after(rows: Range, first: int) -> Range:
    """Return the rows of a matrix in which those of an expert begin with `first`."""
    return Range(first + rows.start, first + rows.stop)


def expected(experts: int, chosen: int, held: int, batch: int) -> float:
    """Return the expected number of a rank's experts that a batch chooses, if all are equally
    likely."""
    return float(held * (1 - (1 - chosen / experts) ** batch))


@dataclass(frozen=True)
class MixtureInstruction(WeightInstruction):
    """Base class of instructions that multiply rows of each chosen expert.

    The operands have `experts`, `chosen` and `held`, and the instruction `rows`.
    """

    rows: Annotated[Range, rules.Within("extent")]
    immaterial: ClassVar[tuple[str, ...]] = ("experts",)
    sides: ClassVar[int] = 1
    """The parts of an expert that have such rows."""
    first_box: ClassVar[None] = None

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The number of rows of the experts that are expected to be chosen, and of columns."""
        operands, (_, columns) = self.at, self.weight_boxes[0]
        count = expected(operands.experts, operands.chosen, operands.held, operands.batch)
        return round(self.sides * self.rows.extent * count), columns[1] - columns[0]

    @property
    def work(self) -> int:
        operands, (_, columns) = self.at, self.weight_shape
        products = self.sides * self.rows.extent * columns * operands.chosen * operands.batch
        return int(products * operands.held // operands.experts)


@dataclass(frozen=True)
class ExpertsOperands(NormedOperands):
    """Gate and up of the experts of a rank: `extent` rows of gate, then of up, for each."""

    ids: Annotated[int, rules.scratch("normed.batch", "chosen", dtype=rules.I32).reads()]
    weight: Annotated[int, rules.weight("held*2*extent", "normed.width").reads()]
    out: Annotated[int, rules.scratch("normed.batch", "chosen", "extent").writes(":", ":", "rows")]
    chosen: Annotated[int, rules.Number(1, "experts")]
    extent: Annotated[int, rules.COUNT]
    held: Annotated[int, rules.COUNT]
    first: Annotated[int, rules.Number(0, "experts - held")]
    """The number of the rank's first expert among all of them."""
    experts: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("weight")]


@instruction
@dataclass(frozen=True)
class NormExperts(MixtureInstruction):
    """silu(gate) · up of each chosen expert, for some rows of gate and the same rows of up."""

    at: ExpertsOperands
    sides: ClassVar[int] = 2
    name: ClassVar[str] = "norm_experts"
    opcode: ClassVar[int] = 18

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, rows = self.at, self.rows
        x = operands.normed.value(memory, probe, "mlp_norm")
        weight, extent = operands.weight, operands.extent
        choices = chosen(memory[operands.ids], operands.first, operands.held)
        for expert, sequences, places in choices:
            sides = (
                linear(memory, x[sequences], weight, NONE, _rows_after(rows, side * extent))
                for side in (2 * expert, 2 * expert + 1)
            )
            memory[operands.out][sequences, places, rows.slice] = swiglu(*sides)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        x = RMS_NORM(*operands.normed.operands(values), operands.normed.zero_centered)
        hidden = values.call("gated experts", x, values["ids"], values["weight"], operands.first)
        yield Result("out", hidden)


_TERMS = rules.scratch("slots*batch", "extent", dtype=rules.F32)


@dataclass(frozen=True)
class TermsOperands:
    """Down projections of the experts of a rank, `extent` rows for each."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    x: Annotated[int, rules.scratch("batch", "chosen", "width", dtype="T").reads()]
    scores: Annotated[int, rules.scratch("batch", "chosen", dtype="T").reads()]
    ids: Annotated[int, IDS.reads()]
    weight: Annotated[int, rules.weight("held*extent", "width", dtype="T").reads()]
    out: Annotated[int, _TERMS.writes(":batch", "rows")]
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    leaves: Annotated[int, rules.Number(1, "width")]
    chosen: Annotated[int, rules.Number(1, "experts")]
    extent: Annotated[int, rules.COUNT]
    held: Annotated[int, rules.COUNT]
    first: Annotated[int, rules.Number(0, "experts - held")]
    experts: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("weight")]


@instruction
@dataclass(frozen=True)
class ExpertTerms(MixtureInstruction):
    """A term of each sum: some rows of the chosen experts' results, multiplied by their scores.

    The sums over leaves of columns are those of all experts, so that they do not depend on tp.
    """

    at: TermsOperands
    name: ClassVar[str] = "expert_terms"
    opcode: ClassVar[int] = 19

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, rows = self.at, self.rows
        sums = torch.zeros(operands.leaves, operands.batch, rows.extent)
        choices = chosen(memory[operands.ids], operands.first, operands.held)
        for expert, sequences, places in choices:
            x = memory[operands.x][sequences, places]
            wanted = _rows_after(rows, expert * operands.extent)
            scores = memory[operands.scores][sequences, places].float().unsqueeze(-1)
            leaves = leaf_products(x, memory[operands.weight], wanted, operands.leaves)
            for terms, leaf in zip(sums, leaves, strict=True):
                terms[sequences] += leaf * scores
        memory[operands.out][: operands.batch, rows.slice] = fold_tree(list(sums), torch.add)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = (values[name] for name in ("x", "scores", "ids", "weight"))
        terms = values.call("sum of experts", *operands, self.at.first)
        yield Result("out", terms, (Range(0, self.at.batch),))


@dataclass(frozen=True)
class SharedOperands:
    """The down projection of a shared expert, and the gate of each sequence."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    x: Annotated[int, rules.scratch("batch", "width", dtype="T").reads()]
    gate: Annotated[int, rules.scratch("batch", "1", dtype="T").reads()]
    weight: Annotated[int, rules.weight("extent", "width", dtype="T").reads("rows")]
    out: Annotated[int, _TERMS.writes("terms", "rows")]
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    leaves: Annotated[int, rules.Number(1, "width")]
    extent: Annotated[int, rules.COUNT]
    slot: Annotated[int, rules.Number(0, "slots - 1")]
    format: Annotated[Format, rules.FormatOf("weight")]


@instruction
@dataclass(frozen=True)
class SharedTerms(WeightInstruction):
    """A term of each sum: some rows of the shared expert's result, multiplied by its gate."""

    at: SharedOperands
    rows: Annotated[Range, rules.Within("extent")]
    terms = Interval("slot*batch")
    name: ClassVar[str] = "shared_terms"
    opcode: ClassVar[int] = 20

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands = self.at
        share = sigmoid(memory[operands.gate].float()).to(memory[operands.gate].dtype).float()
        leaves = leaf_products(
            memory[operands.x], memory[operands.weight], self.rows, operands.leaves
        )
        sums = fold_tree([leaf * share for leaf in leaves], torch.add)
        memory[operands.out][self.terms.slice, self.rows.slice] = sums

    def meaning(self, values: Values) -> Iterator[Result]:
        share = torch.ops.aten.sigmoid.default(values["gate"])
        gated = share * LINEAR(values["x"], values["weight"], None)
        yield Result("out", gated, (self.terms,))


def _leaves(ranks: int, width: int, stored: Format) -> int:
    """Return the number of leaves of a rank. They cut no group of columns that share a scale.

    An expert is narrow, so leaves that begin within a group would take most of the time.
    """
    leaves = leaves_of(ranks, width)
    while leaves > 1 and not stored.plain and width % (leaves * stored.block):
        leaves //= 2
    return leaves


@lowers(NORM_EXPERTS, terms=True)
def norm_experts(builder: Building, node: fx.Node) -> None:
    """Lower the experts to blocks of their features, and then to blocks of their results."""
    bound, batch = builder.bound(node), builder.plan.batch
    gate_up, down = value_type(bound["gate_up"]), value_type(bound["down"])
    choices = width_of(bound["ids"])
    shapes = [down.local_shape(rank) for rank in range(builder.ranks)]
    hidden = builder.declare(
        "hidden", [(batch, choices, int(shape[2])) for shape in shapes], value_type(node).dtype
    )
    shared = any(user.target is SHARED_EXPERT for user in node.users)
    terms = terms_buffer(builder, Site.EXPERTS, node, slots=1 + shared)
    builder.put(node, terms)
    experts = down.shape[0]
    for rank in range(builder.ranks):
        held, rows, width = map(int, shapes[rank])
        common: dict[str, Any] = {
            "rank": rank,
            "layer": layer_of(node),
            "ids": builder.buffer(bound["ids"], rank),
            "chosen": choices,
            "held": held,
            "first": builder.bound(node, rank)["first"],
            "experts": experts,
        }
        up = ExpertsOperands(
            normed=normed(builder, node, rank),
            weight=builder.buffer(bound["gate_up"], rank),
            out=hidden + rank,
            extent=width,
            format=gate_up.stored,
            **common,
        )
        builder.deal(NormExperts(at=up, rows=block) for block in builder.plan.blocks(width))
        terms_operands = TermsOperands(
            x=hidden + rank,
            scores=builder.buffer(bound["scores"], rank),
            weight=builder.buffer(bound["down"], rank),
            out=terms + rank,
            batch=batch,
            width=width,
            leaves=_leaves(builder.ranks, width, down.stored),
            extent=rows,
            format=down.stored,
            **common,
        )
        builder.deal(
            ExpertTerms(at=terms_operands, rows=block) for block in builder.plan.blocks(rows)
        )


@lowers(SHARED_EXPERT, terms=True)
def shared_expert(builder: Building, node: fx.Node) -> None:
    """Lower the shared expert's result to blocks of rows, in a slot of its own."""
    bound = builder.bound(node)
    terms = builder.buffer(bound["routed"], 0)
    builder.put(node, terms)
    weight = value_type(bound["weight"])
    for rank in range(builder.ranks):
        rows, width = map(int, weight.local_shape(rank))
        operands = SharedOperands(
            rank=rank,
            layer=layer_of(node),
            x=builder.buffer(bound["x"], rank),
            gate=builder.buffer(bound["gate"], rank),
            weight=builder.buffer(bound["weight"], rank),
            out=terms + rank,
            batch=builder.plan.batch,
            width=width,
            leaves=_leaves(builder.ranks, width, weight.stored),
            extent=rows,
            slot=1,
            format=weight.stored,
        )
        builder.deal(SharedTerms(operands, block) for block in builder.plan.blocks(rows))


@lowers(ADD_RESIDUAL)
def add_residual(builder: Building, node: fx.Node) -> None:
    """Lower the sum of a single rank's terms, added to the residual."""
    bound = builder.bound(node)
    sum_terms(builder, node, builder.buffer(bound["terms"], 0), bound["residual"], None)
