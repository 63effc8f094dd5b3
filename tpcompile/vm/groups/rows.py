"""Linears of the normed residual whose results other instructions of the layer read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import (
    DELTA_STEPS,
    GATED_ATTENTION_REDUCE,
    SHARED_EXPERT,
    TOP_EXPERTS,
    arguments_of,
)
from tpcompile.vm.groups.normed import NormedOperands, linear, normed
from tpcompile.vm.lowering.building import Building, layer_of
from tpcompile.vm.program import Format, rules
from tpcompile.vm.program.instruction import Memory, Probe, Range, WeightInstruction, unseen
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


class Wanted(IntEnum):
    """The use of a linear: for linear attention, for gates of attention, or for experts.

    The channels of linear attention and the gates `z` of its results may come from one linear.
    """

    PROJECTED = 0
    GATES = 1
    GATE = 2
    Z = 3
    ROUTER = 4
    """The logits of a router."""
    SHARED_GATE = 5
    """The gate of a shared expert."""

    @property
    def group(self) -> str:
        """The name of the values in comparisons. The gate of an MLP is another value."""
        return "attention_gate" if self == Wanted.GATE else self.name.lower()

    @property
    def norm(self) -> str:
        """The name of the normed residual in comparisons, by the half of the layer."""
        return "mlp_norm" if self in (Wanted.ROUTER, Wanted.SHARED_GATE) else "norm"


@dataclass(frozen=True)
class RowsOperands(NormedOperands):
    """A linear of the normed residual."""

    weight: Annotated[int, rules.weight("width", "normed.width").reads("rows")]
    bias: Annotated[int, rules.maybe(rules.weight("width").reads("rows"))]
    out: Annotated[int, rules.scratch("normed.batch", "width").writes(":", "rows")]
    width: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("weight")]
    wanted: Wanted


@instruction
@dataclass(frozen=True)
class NormRows(WeightInstruction):
    """Some rows of a linear of the normed residual, for other instructions of the layer."""

    at: RowsOperands
    rows: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "norm_rows"
    opcode: ClassVar[int] = 15

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands = self.at
        x = operands.normed.value(memory, probe, operands.wanted.norm)
        memory[operands.out][:, self.rows.slice] = linear(
            memory, x, operands.weight, operands.bias, self.rows
        )

    def meaning(self, values: Values) -> Iterator[Result]:
        yield Result("out", self.at.normed.projected(values))

    def report(self, memory: Memory, probe: Probe) -> None:
        values = memory[self.at.out][:, self.rows.slice]
        probe(self.at.wanted.group, Range(0, self.at.batch), self.rows, values)


def norm_rows(builder: Building, node: fx.Node) -> None:
    """Lower the node to blocks of rows."""
    bound, columns = builder.bound(node), builder.local_columns(node)
    wanted = _wanted(node)
    shapes = [(builder.plan.batch, width) for width in columns]
    out = builder.declare(wanted.name.lower(), shapes, value_type(node).dtype)
    builder.put(node, out)
    for rank in range(builder.ranks):
        operands = RowsOperands(
            rank=rank,
            layer=layer_of(node),
            normed=normed(builder, node, rank),
            weight=builder.buffer(bound["weight"], rank),
            bias=builder.buffer_if(bound["bias"], rank),
            out=out + rank,
            width=columns[rank],
            format=value_type(bound["weight"]).stored,
            wanted=wanted,
        )
        builder.deal(NormRows(operands, rows) for rows in builder.plan.blocks(columns[rank]))


def _wanted(node: fx.Node) -> Wanted:
    (reader,) = node.users
    if reader.target in _WANTED:
        return _WANTED[reader.target]
    (name,) = (name for name, arg in arguments_of(reader).items() if arg is node)
    return Wanted[name.upper()]


_WANTED = {
    GATED_ATTENTION_REDUCE: Wanted.GATE,
    TOP_EXPERTS: Wanted.ROUTER,
    SHARED_EXPERT: Wanted.SHARED_GATE,
}
"""The use of the linear, by its reader."""
ROWS_READERS = (*DELTA_STEPS, *_WANTED)
"""The ops that read such a linear."""
