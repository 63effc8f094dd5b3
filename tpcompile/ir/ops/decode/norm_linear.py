"""Fused norm and linear: gate and up with SwiGLU, and the LM head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tpcompile.ir.ops.elementwise import swiglu, swiglu_rule
from tpcompile.ir.ops.linear import linear_cost, linear_rule
from tpcompile.ir.ops.norm import rms_norm, rms_norm_rule
from tpcompile.ir.ops.parts import split_rule
from tpcompile.ir.ops.spec import Cost, define, require
from tpcompile.ir.types import ValueType


def norm_linear(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a linear to the normed rows of `x`."""
    return functional.linear(rms_norm(x, norm, eps), weight, bias)


def norm_gate_up_swiglu(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute silu(gate) · up of the normed rows of `x`.

    `weight` contains the rows of gate, followed by the same number of rows of up.
    """
    gate, up = norm_linear(x, norm, eps, weight, bias).chunk(2, -1)
    return swiglu(gate, up)


def _linear_rule(
    x: ValueType, norm: ValueType, eps: float, weight: ValueType, bias: ValueType | None = None
) -> ValueType:
    return linear_rule(rms_norm_rule(x, norm, eps), weight, bias)


def _gate_up_rule(
    x: ValueType, norm: ValueType, eps: float, weight: ValueType, bias: ValueType | None = None
) -> ValueType:
    """Infer the type; gate and up have the same layout, so a rank has as many rows of each."""
    rows = _linear_rule(x, norm, eps, weight, bias)
    both = rows.shape[-1]
    assert isinstance(both, int)
    require(both % 2 == 0, "gate-up", weight, "as many rows of gate as of up")
    gate, up = split_rule(rows, (both // 2, both // 2), rows.dims - 1)
    return swiglu_rule(gate, up)


def _cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    x, norm, weight, *bias = operands
    return linear_cost(result, [x, weight, norm, *bias], rank)


NORM_LINEAR = define(norm_linear, rule=_linear_rule, cost=_cost)
NORM_GATE_UP_SWIGLU = define(norm_gate_up_swiglu, rule=_gate_up_rule, cost=_cost)
