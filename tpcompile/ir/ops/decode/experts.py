"""Experts of the normed residual, the shared expert, and their sum with the residual."""

from __future__ import annotations

import torch

from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.experts import EXPERTS
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.norm import RMS_NORM
from tpcompile.ir.ops.spec import SPECS, require
from tpcompile.ir.types import REPLICATE, ValueType

aten = torch.ops.aten


def norm_experts(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    scores: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    zero_centered: bool = False,
    first: int = 0,
) -> torch.Tensor:
    """Add the results of the experts of each normed row of `x`, multiplied by their scores."""
    normed = RMS_NORM(x, norm, eps, zero_centered)
    total: torch.Tensor = EXPERTS(normed, scores, ids, gate_up, down, first)
    return total


def shared_expert(
    routed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """Add the linear of `x`, multiplied by the sigmoid of a gate per token, to other results."""
    total: torch.Tensor = routed + aten.sigmoid.default(gate) * LINEAR(x, weight, None)
    return total


def add_residual(terms: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Add results of experts, of one rank, to the residual."""
    total: torch.Tensor = residual + terms
    return total


def _check_residual(terms: ValueType, residual: ValueType) -> None:
    whole = terms == residual and residual.placement == REPLICATE
    require(whole, "residual-once", f"{terms} and {residual}", "two values that are whole")


NORM_EXPERTS = composite(
    norm_experts, localize=SPECS[EXPERTS].localize, in_formats=("gate_up", "down")
)
SHARED_EXPERT = composite(shared_expert)
ADD_RESIDUAL = composite(add_residual, check=_check_residual)
EXPERT_TERMS = (NORM_EXPERTS, SHARED_EXPERT)
"""The ops whose results are terms, which are summed and added to the residual."""
