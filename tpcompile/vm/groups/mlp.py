"""Gate and up projections of the normed residual, and their activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU
from tpcompile.vm.groups.arithmetic import swiglu
from tpcompile.vm.groups.normed import Normed, linear, normed
from tpcompile.vm.lowering.building import Building, layer_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import DType, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import Memory, Probe, Range, WeightInstruction, unseen
from tpcompile.vm.program.instruction_set import instruction


@dataclass(frozen=True)
class GateUpOperands:
    """The operands of gate and up; the weight has `ffn` rows of gate, then `ffn` rows of up."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    normed: Normed
    weight: Annotated[int, rules.weight("2*ffn", "normed.width").reads("rows").reads("up", turn=1)]
    bias: Annotated[int, rules.maybe(rules.weight("2*ffn").reads("rows").reads("up", turn=1))]
    out: Annotated[int, rules.scratch("normed.batch", "ffn").writes(":", "rows")]
    ffn: Annotated[int, rules.COUNT]
    dtype: Annotated[DType, rules.DTypeOf("weight")]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.normed.batch


@instruction
@dataclass(frozen=True)
class NormGateUpSwiglu(WeightInstruction):
    """silu(gate) · up, for some rows of gate and the same rows of up."""

    at: GateUpOperands
    rows: Annotated[Range, rules.Within("ffn")]
    up = Interval("ffn + rows")
    name: ClassVar[str] = "norm_gate_up_swiglu"
    opcode: ClassVar[int] = 9

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        at = self.at
        x = at.normed.value(memory, probe, "mlp_norm")
        gate, up = (linear(memory, x, at.weight, at.bias, rows) for rows in (self.rows, self.up))
        memory[at.out][:, self.rows.slice] = swiglu(gate, up)

    def report(self, memory: Memory, probe: Probe) -> None:
        found = memory[self.at.out][:, self.rows.slice]
        probe("swiglu", Range(0, self.at.batch), self.rows, found)


@lowers(NORM_GATE_UP_SWIGLU)
def norm_gate_up(to: Building, node: fx.Node) -> None:
    """Lower gate and up to blocks of the MLP's width."""
    bound = to.bound(node)
    columns = to.local_columns(node)
    out = to.declare(
        "swiglu", [(to.plan.batch, width) for width in columns], value_type(node).dtype
    )
    to.put(node, out)
    for rank in range(to.ranks):
        at = GateUpOperands(
            rank=rank,
            layer=layer_of(node),
            normed=normed(to, node, rank),
            weight=to.where(bound["weight"], rank),
            bias=to.where_if(bound["bias"], rank),
            out=out + rank,
            ffn=columns[rank],
            dtype=DType.of(value_type(bound["weight"]).dtype),
        )
        to.deal(NormGateUpSwiglu(at, rows) for rows in to.plan.blocks(columns[rank]))
