"""Fused norm and linear: gate and up with SwiGLU, and the LM head."""

from __future__ import annotations

from typing import Any

import torch

from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.elementwise import SWIGLU
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.norm import RMS_NORM
from tpcompile.ir.ops.spec import require
from tpcompile.ir.types import ValueType

SPLIT = torch.ops.aten.split_with_sizes.default


def norm_linear(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a linear to the normed rows of `x`."""
    rows: torch.Tensor = LINEAR(RMS_NORM(x, norm, eps), weight, bias)
    return rows


def norm_gate_up_swiglu(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute silu(gate) · up of the normed rows of `x[T, hidden]`.

    `weight` contains the rows of gate, followed by the same number of rows of up. Both have the
    same layout, so a rank has as many rows of each.
    """
    rows = norm_linear(x, norm, eps, weight, bias)
    width = rows.shape[1] // 2
    parts = SPLIT(rows, [width, width], 1)
    activated: torch.Tensor = SWIGLU(parts[0], parts[1])
    return activated


def check_gate_up(weight: ValueType, **_: Any) -> None:
    """Refuse a weight whose rows are not as many of gate as of up."""
    both = weight.shape[0]
    assert isinstance(both, int)
    require(both % 2 == 0, "gate-up", weight, "as many rows of gate as of up")


NORM_LINEAR = composite(norm_linear)
NORM_GATE_UP_SWIGLU = composite(norm_gate_up_swiglu, check=check_gate_up)
