"""The normed residual: each instruction that reads it norms all of it for itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tpcompile.vm.arithmetic import rms_norm
from tpcompile.vm.instructions.base import Memory, Probe, Range, columns_of
from tpcompile.vm.region import Region


@dataclass(frozen=True)
class Normed:
    """RMS norm of `x[batch, width]`."""

    x: int
    weight: int
    batch: int
    width: int
    eps: float

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        columns = Range(0, self.width)
        return (columns_of(self.x, self.batch, columns), Region(self.weight, (columns,)))

    def value(self, memory: Memory, probe: Probe, name: str) -> torch.Tensor:
        found = rms_norm(memory[self.x], memory[self.weight], self.eps)
        probe(name, Range(0, self.batch), Range(0, self.width), found)
        return found
