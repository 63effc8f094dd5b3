"""Gate and up projections of the normed residual, or up alone, and their activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU, NORM_MLPS, Activation
from tpcompile.vm.groups.arithmetic import activated, swiglu
from tpcompile.vm.groups.normed import Normed, linear, normed
from tpcompile.vm.lowering.building import Building, layer_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Format, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.fields import operands_of
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
    format: Annotated[Format, rules.FormatOf("weight")]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.normed.batch


@dataclass(frozen=True)
class UpOperands(GateUpOperands):
    """The operands of an activation; with one side, the weight has only the rows of up."""

    weight: Annotated[
        int,
        rules.weight("sides*ffn", "normed.width")
        .reads("rows")
        .reads("up", turn=1, unless=("sides", 1)),
    ]
    bias: Annotated[
        int,
        rules.maybe(
            rules.weight("sides*ffn").reads("rows").reads("up", turn=1, unless=("sides", 1))
        ),
    ]
    sides: Annotated[int, rules.Number(1, "2")]
    activation: Activation


@dataclass(frozen=True)
class ActivatedRows(WeightInstruction):
    """Some rows of an MLP's activation, from the same rows of its projections."""

    at: GateUpOperands
    rows: Annotated[Range, rules.Within("ffn")]
    up = Interval("ffn + rows")
    result: ClassVar[str]
    """The name of the result's buffer, and of its values in comparisons."""

    def projected(self, memory: Memory, probe: Probe, *sides: Range) -> list[torch.Tensor]:
        """Return these rows of the projections."""
        at = self.at
        x = at.normed.value(memory, probe, "mlp_norm")
        return [linear(memory, x, at.weight, at.bias, rows) for rows in sides]

    def report(self, memory: Memory, probe: Probe) -> None:
        found = memory[self.at.out][:, self.rows.slice]
        probe(self.result, Range(0, self.at.batch), self.rows, found)


@instruction
@dataclass(frozen=True)
class NormGateUpSwiglu(ActivatedRows):
    """silu(gate) · up, for some rows of gate and the same rows of up."""

    at: GateUpOperands
    name: ClassVar[str] = "norm_gate_up_swiglu"
    opcode: ClassVar[int] = 9
    result: ClassVar[str] = "swiglu"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        sides = self.projected(memory, probe, self.rows, self.up)
        memory[self.at.out][:, self.rows.slice] = swiglu(*sides)


@instruction
@dataclass(frozen=True)
class NormUpActivation(ActivatedRows):
    """act(gate) · up for some rows, or act(up) of an MLP without a gate."""

    at: UpOperands
    name: ClassVar[str] = "norm_up_activation"
    opcode: ClassVar[int] = 12
    result: ClassVar[str] = "activated"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        sides = self.projected(memory, probe, *(self.rows, self.up)[: self.at.sides])
        memory[self.at.out][:, self.rows.slice] = activated(self.at.activation, *sides)


_FORMS = {target: form for form, target in NORM_MLPS.items()}


@lowers(*_FORMS)
def norm_gate_up(to: Building, node: fx.Node) -> None:
    """Lower gate and up to blocks of the MLP's width."""
    bound = to.bound(node)
    columns = to.local_columns(node)
    activation, gated = _FORMS[node.target]
    kind: type[ActivatedRows] = NormUpActivation
    more_operands: dict[str, Any] = {"sides": 1 + gated, "activation": activation}
    if node.target is NORM_GATE_UP_SWIGLU:
        kind, more_operands = NormGateUpSwiglu, {}
    out = to.declare(
        kind.result, [(to.plan.batch, width) for width in columns], value_type(node).dtype
    )
    to.put(node, out)
    for rank in range(to.ranks):
        at = operands_of(kind)(
            rank=rank,
            layer=layer_of(node),
            normed=normed(to, node, rank),
            weight=to.where(bound["weight"], rank),
            bias=to.where_if(bound["bias"], rank),
            out=out + rank,
            ffn=columns[rank],
            format=value_type(bound["weight"]).stored,
            **more_operands,
        )
        to.deal(kind(at, rows) for rows in to.plan.blocks(columns[rank]))
