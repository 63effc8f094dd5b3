"""Gate and up projections of the normed residual, or up alone, and their activation.

An instruction reads rows of one weight. If gate and up have a weight each, which may differ in
format, one instruction stores some rows of gate, and another one multiplies their activation by the
same rows of up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import NORM_GATE_UP_SWIGLU, NORM_MLPS, NORM_MLPS_APART, SWIGLU, Activation
from tpcompile.vm.groups.arithmetic import activated, swiglu
from tpcompile.vm.groups.normed import NormedOperands, linear, normed
from tpcompile.vm.lowering.building import Building, layer_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Format, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.fields import operands_of
from tpcompile.vm.program.instruction import Memory, Probe, Range, WeightInstruction, unseen
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


@dataclass(frozen=True)
class GateUpOperands(NormedOperands):
    """The operands of gate and up; the weight has `ffn` rows of gate, then `ffn` rows of up."""

    weight: Annotated[int, rules.weight("2*ffn", "normed.width").reads("rows").reads("up", turn=1)]
    bias: Annotated[int, rules.maybe(rules.weight("2*ffn").reads("rows").reads("up", turn=1))]
    out: Annotated[int, rules.scratch("normed.batch", "ffn").writes(":", "rows")]
    ffn: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("weight")]


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
class GateOperands(GateUpOperands):
    """The operands of gate alone; the weight has its `ffn` rows."""

    weight: Annotated[int, rules.weight("ffn", "normed.width").reads("rows")]
    bias: Annotated[int, rules.maybe(rules.weight("ffn").reads("rows"))]


@dataclass(frozen=True)
class GatedUpOperands(GateOperands):
    """The operands of up beside a gate that is stored; the weight has the `ffn` rows of up."""

    gate: Annotated[int, rules.scratch("normed.batch", "ffn").reads(":", "rows", turn=1)]
    activation: Activation


@dataclass(frozen=True)
class MlpRows(WeightInstruction):
    """Some columns of an MLP's value, from the same rows of its projections."""

    at: GateUpOperands
    rows: Annotated[Range, rules.Within("ffn")]
    result: ClassVar[str]
    """The name of the result's buffer, and of its values in comparisons."""

    def projected(self, memory: Memory, probe: Probe, *sides: Range) -> list[torch.Tensor]:
        """Return these rows of the projections."""
        operands = self.at
        x = operands.normed.value(memory, probe, "mlp_norm")
        return [linear(memory, x, operands.weight, operands.bias, rows) for rows in sides]

    def report(self, memory: Memory, probe: Probe) -> None:
        values = memory[self.at.out][:, self.rows.slice]
        probe(self.result, Range(0, self.at.batch), self.rows, values)


@instruction
@dataclass(frozen=True)
class NormGateUpSwiglu(MlpRows):
    """silu(gate) · up, for some rows of gate and the same rows of up."""

    at: GateUpOperands
    up = Interval("ffn + rows")
    name: ClassVar[str] = "norm_gate_up_swiglu"
    opcode: ClassVar[int] = 9
    result: ClassVar[str] = "swiglu"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        sides = self.projected(memory, probe, self.rows, self.up)
        memory[self.at.out][:, self.rows.slice] = swiglu(*sides)

    def meaning(self, values: Values) -> Iterator[Result]:
        yield Result("out", self.at.normed.projected(values, NORM_GATE_UP_SWIGLU))


@instruction
@dataclass(frozen=True)
class NormUpActivation(MlpRows):
    """act(gate) · up for some rows, or act(up) of an MLP without a gate."""

    at: UpOperands
    up = Interval("ffn + rows")
    name: ClassVar[str] = "norm_up_activation"
    opcode: ClassVar[int] = 12
    result: ClassVar[str] = "activated"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        sides = self.projected(memory, probe, *(self.rows, self.up)[: self.at.sides])
        memory[self.at.out][:, self.rows.slice] = activated(self.at.activation, *sides)

    def meaning(self, values: Values) -> Iterator[Result]:
        form = self.at.activation, self.at.sides > 1
        yield Result("out", self.at.normed.projected(values, NORM_MLPS[form]))


@instruction
@dataclass(frozen=True)
class NormGate(MlpRows):
    """Some rows of gate, for `norm_gated_up`: up has a weight of its own."""

    at: GateOperands
    name: ClassVar[str] = "norm_gate"
    opcode: ClassVar[int] = 13
    result: ClassVar[str] = "gate"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        (gate,) = self.projected(memory, probe, self.rows)
        memory[self.at.out][:, self.rows.slice] = gate

    def meaning(self, values: Values) -> Iterator[Result]:
        yield Result("out", self.at.normed.projected(values))


@instruction
@dataclass(frozen=True)
class NormGatedUp(MlpRows):
    """act(gate) · up, for some rows of up and the same rows of gate, which are stored."""

    at: GatedUpOperands
    name: ClassVar[str] = "norm_gated_up"
    opcode: ClassVar[int] = 14
    result: ClassVar[str] = "activated"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, columns = self.at, self.rows.slice
        (up,) = self.projected(memory, probe, self.rows)
        memory[operands.out][:, columns] = activated(
            operands.activation, memory[operands.gate][:, columns], up
        )

    def meaning(self, values: Values) -> Iterator[Result]:
        activation = self.at.activation
        function = SWIGLU if activation is Activation.SILU else activation.of
        yield Result("out", function(values["gate"], self.at.normed.projected(values)))


_FORMS = {target: form for form, target in NORM_MLPS.items()}
_APART = {target: activation for activation, target in NORM_MLPS_APART.items()}


@lowers(*_FORMS)
def norm_gate_up(builder: Building, node: fx.Node) -> None:
    """Lower gate and up, or up alone, to blocks of the MLP's width."""
    activation, gated = _FORMS[node.target]
    if node.target is NORM_GATE_UP_SWIGLU:
        out = _deal(builder, node, NormGateUpSwiglu, "")
    else:
        out = _deal(builder, node, NormUpActivation, "", sides=1 + gated, activation=activation)
    builder.put(node, out)


@lowers(*_APART)
def norm_gate_and_up(builder: Building, node: fx.Node) -> None:
    """Lower gate, then up, to blocks of the MLP's width."""
    gate = _deal(builder, node, NormGate, "gate_")
    up = _deal(builder, node, NormGatedUp, "up_", gate=gate, activation=_APART[node.target])
    builder.put(node, up)


def _deal(
    builder: Building,
    node: fx.Node,
    kind: type[MlpRows],
    side: str,
    gate: int | None = None,
    **more_operands: Any,
) -> int:
    """Append the instructions of a linear, whose operands have a prefix in the op.

    `gate` is rank 0's buffer of a gate. Return rank 0's buffer of the results.
    """
    bound = builder.bound(node)
    weight, bias = bound[f"{side}weight"], bound[f"{side}bias"]
    columns = builder.local_columns(node)
    out = builder.declare(
        kind.result, [(builder.plan.batch, width) for width in columns], value_type(node).dtype
    )
    for rank in range(builder.ranks):
        if gate is not None:
            more_operands["gate"] = gate + rank
        operands = operands_of(kind)(
            rank=rank,
            layer=layer_of(node),
            normed=normed(builder, node, rank),
            weight=builder.buffer(weight, rank),
            bias=builder.buffer_if(bias, rank),
            out=out + rank,
            ffn=columns[rank],
            format=value_type(weight).stored,
            **more_operands,
        )
        builder.deal(kind(operands, rows) for rows in builder.plan.blocks(columns[rank]))
    return out
