"""Fused norm and linear: gate and up with their activation, and the LM head."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from tpcompile.ir.ops.activation import Activation
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
    zero_centered: bool = False,
) -> torch.Tensor:
    """Apply a linear to the normed rows of `x`."""
    rows: torch.Tensor = LINEAR(RMS_NORM(x, norm, eps, zero_centered), weight, bias)
    return rows


def norm_gate_up_swiglu(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """Compute silu(gate) · up of the normed rows of `x[T, hidden]`.

    `weight` contains the rows of gate, followed by the same number of rows of up. Both have the
    same layout, so a rank has as many rows of each.
    """
    activated: torch.Tensor = SWIGLU(
        *_halves(norm_linear(x, norm, eps, weight, bias, zero_centered))
    )
    return activated


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = rows.shape[1] // 2
    parts = SPLIT(rows, [width, width], 1)
    return parts[0], parts[1]


def check_gate_up(weight: ValueType, **_: Any) -> None:
    """Refuse a weight with an odd number of rows, which gate and up cannot share."""
    require(weight.extent(0) % 2 == 0, "gate-up", weight, "as many rows of gate as of up")


def _norm_mlp(activation: Activation, gated: bool) -> Any:
    """Declare the op of an MLP with this activation, up to the down projection."""

    def body(
        x: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        zero_centered: bool = False,
    ) -> torch.Tensor:
        rows = norm_linear(x, norm, eps, weight, bias, zero_centered)
        activated: torch.Tensor = activation.of(*_halves(rows) if gated else [rows])
        return activated

    body.__name__ = f"norm_{'gate_' if gated else ''}up_{activation.name.lower()}"
    options: dict[str, Any] = {"check": check_gate_up} if gated else {}
    return composite(body, **options)


def _norm_mlp_apart(activation: Activation) -> Any:
    """Declare the op of an MLP whose gate and up have a weight each, up to the down projection."""
    function = SWIGLU if activation is Activation.SILU else activation.of

    def body(
        x: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        gate_weight: torch.Tensor,
        up_weight: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        zero_centered: bool = False,
    ) -> torch.Tensor:
        normed = RMS_NORM(x, norm, eps, zero_centered)
        gate, up = LINEAR(normed, gate_weight, gate_bias), LINEAR(normed, up_weight, up_bias)
        activated: torch.Tensor = function(gate, up)
        return activated

    body.__name__ = f"norm_gate_and_up_{activation.name.lower()}"
    return composite(body)


NORM_LINEAR = composite(norm_linear, takes_roles=True)
NORM_GATE_UP_SWIGLU = composite(norm_gate_up_swiglu, check=check_gate_up)
_SWIGLU = (Activation.SILU, True)
NORM_MLPS: Mapping[tuple[Activation, bool], Any] = {
    _SWIGLU: NORM_GATE_UP_SWIGLU,
    **{form: _norm_mlp(*form) for form in product(Activation, (True, False)) if form != _SWIGLU},
}
"""The op of an MLP, up to the down projection, by its activation and whether it has a gate."""
NORM_MLPS_APART: Mapping[Activation, Any] = {
    activation: _norm_mlp_apart(activation) for activation in Activation
}
"""The op of an MLP whose gate and up have a weight each, which may differ in format."""
