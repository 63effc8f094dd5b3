"""Projections that are added to the residual: directly on one rank, after a sum on several.

The columns are split into leaves, whose sums are added in a fixed tree. A rank, or a worker with
some of the columns, computes a subtree. So the bits do not depend on how the work is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import fx

from tpcompile.errors import UsageError
from tpcompile.ir.layout import even_runs
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL
from tpcompile.ir.types import Partial
from tpcompile.vm.groups.arithmetic import leaves_of, products
from tpcompile.vm.groups.reduce import sum_terms
from tpcompile.vm.groups.residual import Site, residual_buffer, site_of, terms_buffer
from tpcompile.vm.lowering.building import Building, layer_of, width_of
from tpcompile.vm.lowering.handlers import lowers, read_by
from tpcompile.vm.program import Format, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    WeightInstruction,
    unseen,
    with_bias,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


@dataclass(frozen=True)
class ProjectOperands:
    """`x[batch, width]` times a weight. The residual is absent if only terms are computed."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    site: Site
    x: int
    weight: int
    bias: int
    residual: int
    out: int
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    leaves: Annotated[int, rules.Number(1, "width")]
    format: Annotated[Format, rules.FormatOf("weight")]


_X = rules.scratch("batch", "width", dtype="T")
_WEIGHT = rules.weight("all_rows", "width", dtype="T")
_RESIDUAL = rules.scratch("batch", "all_rows", dtype="R")
_TERMS = rules.scratch("slots*batch", "all_rows", dtype=rules.F32)


@instruction
@dataclass(frozen=True)
class LinearResidual(WeightInstruction):
    """Some rows of a projection, added to the residual."""

    at: Annotated[
        ProjectOperands,
        {
            "x": _X.reads(),
            "weight": _WEIGHT.reads("rows"),
            "bias": rules.maybe(rules.weight("all_rows", dtype="T").reads("rows", turn=1)),
            "residual": _RESIDUAL.reads(":", "rows"),
            "out": _RESIDUAL.writes(":", "rows"),
        },
    ]
    rows: Annotated[Range, rules.Within("all_rows")]
    name: ClassVar[str] = "linear_residual"
    opcode: ClassVar[int] = 6

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands = self.at
        sums = products(
            memory[operands.x], memory[operands.weight], self.rows, leaves=operands.leaves
        )
        sums = with_bias(memory, operands.bias, self.rows, sums)
        sums = memory[operands.residual][:, self.rows.slice].float() + sums
        memory[operands.out][:, self.rows.slice] = sums.to(memory[operands.out].dtype)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = (values[name] for name in ("x", "weight", "bias", "residual"))
        yield Result("out", LINEAR_RESIDUAL(*operands))

    def report(self, memory: Memory, probe: Probe) -> None:
        values = memory[self.at.out][:, self.rows.slice]
        probe(self.at.site.group, Range(0, self.at.batch), self.rows, values)


@instruction
@dataclass(frozen=True)
class LinearTerms(WeightInstruction):
    """A term of each sum: some rows and columns of a projection, in a slot of its own."""

    at: Annotated[
        ProjectOperands,
        {
            "x": _X.reads(":", "columns"),
            "weight": _WEIGHT.reads("rows", "columns"),
            "bias": rules.Missing(),
            "residual": rules.Missing(),
            "out": _TERMS.writes("terms", "rows"),
        },
    ]
    rows: Annotated[Range, rules.Within("all_rows")]
    columns: Annotated[Range, rules.Within("width", "leaves")]
    slot: Annotated[int, rules.Number(0, "slots - 1")]
    leaves: Annotated[int, rules.Number(1, "width")]
    """The number of leaves within these columns."""
    terms = Interval("slot*batch")
    apart: ClassVar[tuple[str, ...]] = ("columns", "slot", "leaves")
    name: ClassVar[str] = "linear_terms"
    opcode: ClassVar[int] = 7

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        x = memory[self.at.x][:, self.columns.slice]
        sums = products(x, memory[self.at.weight], self.rows, self.columns, self.leaves)
        memory[self.at.out][self.terms.slice, self.rows.slice] = sums

    def meaning(self, values: Values) -> Iterator[Result]:
        sums = values.call("linear of columns", values["x"], values["weight"], *self.columns)
        yield Result("out", sums, (self.terms,))


@lowers(LINEAR_RESIDUAL)
def linear_residual(builder: Building, node: fx.Node) -> None:
    """Lower a projection that each rank computes alone. A sum follows if columns are split."""
    bound = builder.bound(node)
    if builder.plan.column_splits > 1:
        terms = _make_terms(builder, node, bound["x"], bound["weight"])
        sum_terms(builder, node, terms, bound["residual"], bound["bias"])
        return
    out = residual_buffer(builder, node, bound["residual"])
    builder.put(node, out)
    for rank in range(builder.ranks):
        operands = _project_operands(builder, node, rank, out + rank)
        builder.deal(LinearResidual(operands, rows) for rows in builder.plan.blocks(width_of(node)))


@lowers(LINEAR, where=read_by(ALL_REDUCE_RESIDUAL))
def linear_terms(builder: Building, node: fx.Node) -> None:
    """Lower a row-parallel linear to each rank's terms of a sum."""
    x, weight, *bias = node.args
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if not isinstance(value_type(node).placement, Partial) or any(bias):
        raise builder.refusal(node, "no fusion contains this linear")
    builder.put(node, _make_terms(builder, node, x, weight))


def _make_terms(builder: Building, node: fx.Node, x: fx.Node, weight: fx.Node) -> int:
    site = site_of(x)
    terms = terms_buffer(builder, site, node, builder.plan.column_splits)
    for rank in range(builder.ranks):
        operands = _terms_operands(builder, node, rank, x, weight, terms + rank)
        for slot, columns in enumerate(_columns(builder, operands)):
            leaves = operands.leaves // builder.plan.column_splits
            builder.deal(
                LinearTerms(operands, rows, columns, slot, leaves)
                for rows in builder.plan.blocks(width_of(node))
            )
    return terms


def _columns(builder: Building, operands: ProjectOperands) -> list[Range]:
    """Return the columns of each split, which consists of whole leaves."""
    count = builder.plan.column_splits
    if count > operands.leaves:
        raise UsageError(
            f"column_splits={count} is too many on {builder.ranks} ranks",
            expected=f"at most {operands.leaves}, the number of partial sums of a rank",
        )
    leaves, per_split = even_runs(operands.width, operands.leaves), operands.leaves // count
    splits = [leaves[n * per_split : (n + 1) * per_split] for n in range(count)]
    return [Range(split[0][0][0], split[-1][0][1]) for split in splits]


def _terms_operands(
    builder: Building, node: fx.Node, rank: int, x: fx.Node, weight: fx.Node, out: int
) -> ProjectOperands:
    width = value_type(weight).local_extent(rank, 1)
    return ProjectOperands(
        rank=rank,
        layer=layer_of(node),
        site=site_of(x),
        x=builder.buffer(x, rank),
        weight=builder.buffer(weight, rank),
        bias=NONE,
        residual=NONE,
        out=out,
        batch=builder.plan.batch,
        width=width,
        leaves=leaves_of(builder.ranks, width),
        format=value_type(weight).stored,
    )


def _project_operands(builder: Building, node: fx.Node, rank: int, out: int) -> ProjectOperands:
    bound = builder.bound(node)
    operands = _terms_operands(builder, node, rank, bound["x"], bound["weight"], out)
    fields = vars(operands) | {
        "bias": builder.buffer_if(bound["bias"], rank),
        "residual": builder.buffer(bound["residual"], rank),
    }
    return ProjectOperands(**fields)
