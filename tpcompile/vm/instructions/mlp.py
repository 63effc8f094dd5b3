"""Gate and up of the normed residual, and the activation between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from tpcompile.vm.arithmetic import dots, swiglu
from tpcompile.vm.instructions.base import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    columns_of,
    present,
    unseen,
)
from tpcompile.vm.instructions.normed import Normed
from tpcompile.vm.region import Region


@dataclass(frozen=True)
class GateUpOperands:
    """The weight has `ffn` rows of gate, then as many of up."""

    rank: int
    layer: int
    normed: Normed
    weight: int
    bias: int
    out: int
    ffn: int
    item: int

    def weight_reads(self, rows: Range) -> tuple[Region, ...]:
        weight = Region(self.weight, (rows, (0, self.normed.width)))
        return (weight, *present(Region(self.bias, (rows,))))

    def project(self, memory: Memory, x: torch.Tensor, rows: Range) -> torch.Tensor:
        found = dots(x, memory[self.weight][rows.slice])
        if self.bias != NONE:
            found = found + memory[self.bias][rows.slice].float()
        return found.to(x.dtype)


@dataclass(frozen=True)
class NormGateUpSwiglu(StepInstruction):
    """Some rows of gate and the same of up: silu(gate) · up."""

    at: GateUpOperands
    rows: Range
    name: ClassVar[str] = "norm_gate_up_swiglu"

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        at = self.at
        return at.normed.reads + at.weight_reads(self.rows) + at.weight_reads(self._up)

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return (columns_of(self.at.out, self.at.normed.batch, self.rows),)

    @property
    def _up(self) -> Range:
        return Range(self.at.ffn + self.rows.start, self.at.ffn + self.rows.stop)

    @property
    def traffic(self) -> int:
        return 2 * self.rows.extent * self.at.normed.width * self.at.item

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        x = self.at.normed.value(memory, probe, "mlp_norm")
        gate, up = (self.at.project(memory, x, rows) for rows in (self.rows, self._up))
        found = swiglu(gate, up)
        memory[self.at.out][:, self.rows.slice] = found
        probe("swiglu", Range(0, self.at.normed.batch), self.rows, found)
