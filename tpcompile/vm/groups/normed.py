"""The normed residual, and linears of it. Each instruction norms the whole residual itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import fx

from tpcompile.ir.ops import NORM_LINEAR
from tpcompile.vm.groups.arithmetic import products, rms_norm
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.program import rules
from tpcompile.vm.program.instruction import Memory, Probe, Range, to_fp32, with_bias
from tpcompile.vm.program.meaning import Values


@dataclass(frozen=True)
class Normed:
    """RMS norm of `x[batch, width]`."""

    x: Annotated[int, rules.scratch("batch", "width").reads()]
    weight: Annotated[int, rules.weight("width").reads()]
    batch: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    eps: Annotated[float, rules.Real(0.0)]
    zero_centered: bool = False

    def value(self, memory: Memory, probe: Probe, name: str) -> torch.Tensor:
        normalized = rms_norm(memory[self.x], memory[self.weight], self.eps, self.zero_centered)
        probe(name, Range(0, self.batch), Range(0, self.width), normalized)
        return normalized

    def operands(self, values: Values) -> tuple[Any, Any, float]:
        """Return the first operands of ops that begin with this norm."""
        return values["normed.x"], values["normed.weight"], self.eps

    def projected(self, values: Values, op: Any = NORM_LINEAR) -> Any:
        """Apply an op that begins with this norm and the instruction's linear."""
        linear = values["weight"], values["bias"]
        return op(*self.operands(values), *linear, self.zero_centered)


@dataclass(frozen=True)
class NormedOperands:
    """Base class of the operands of instructions that norm the residual."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    normed: Normed

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.normed.batch


def linear(memory: Memory, x: torch.Tensor, weight: int, bias: int, rows: Range) -> torch.Tensor:
    """Apply some rows of a linear to the normed residual, rounded once."""
    return with_bias(memory, bias, rows, products(x, memory[weight], rows)).to(x.dtype)


def normed(builder: Building, node: fx.Node, rank: int) -> Normed:
    """Return the operands of a fused op's norm."""
    bound = builder.bound(node)
    x, weight = builder.buffer(bound["x"], rank), builder.buffer(bound["norm"], rank)
    width, eps = width_of(bound["x"]), to_fp32(bound["eps"])
    return Normed(x, weight, builder.plan.batch, width, eps, bound["zero_centered"])
