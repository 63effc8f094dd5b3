"""A projection added to the residual: on one rank, and after the sum across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpcompile.ir.ops.collectives import ALL_REDUCE, tree_sum
from tpcompile.ir.ops.composite import composite, known, optional
from tpcompile.ir.ops.linear import LINEAR, linear_rule
from tpcompile.ir.ops.spec import Cost, local_bytes, refuse, require
from tpcompile.ir.types import REPLICATE, Partial, ValueType

ADD = torch.ops.aten.add.Tensor


def linear_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """Add a linear of `x` to the residual."""
    total: torch.Tensor = residual + LINEAR(x, weight, bias)
    return total


def all_reduce_residual(
    partial: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    all_reduce: Callable[..., torch.Tensor] = ALL_REDUCE,
) -> torch.Tensor:
    """Add the residual, the bias and the sum of all terms, in the residual's dtype.

    Bias and residual count once, regardless of the number of ranks. The sum is computed in fp32;
    the bias and then the residual are added to it before it is rounded.
    """
    wide = known(torch.promote_types, residual.dtype, torch.float32)
    total: torch.Tensor = optional(ADD, all_reduce(partial, wide), bias)
    return (residual + total).to(residual.dtype)


def _check_linear(
    x: ValueType, weight: ValueType, bias: ValueType | None, residual: ValueType
) -> None:
    projected = linear_rule(x, weight, bias)
    if isinstance(projected.placement, Partial):
        refuse(
            "residual-once",
            f"terms {projected} with the residual {residual}",
            "a projection that needs no sum across ranks",
            "a residual added on every rank would count tp times: use all_reduce_residual",
        )
    _require_alike(projected, residual)


def _check_all_reduce(
    partial: ValueType, residual: ValueType, bias: ValueType | None = None
) -> None:
    require(
        residual.placement == REPLICATE,
        "residual-once",
        residual,
        "a residual that is the same on every rank",
    )
    _require_alike(partial, residual)
    if bias is not None:
        require(
            bias.placement == REPLICATE, "bias-once", bias, "a bias that is the same on every rank"
        )
        fits = (bias.shape, bias.dtype) == (residual.shape[-1:], residual.dtype)
        require(fits, "bias-shape", f"{bias} with {residual}", "one bias element per column")


def _require_alike(added: ValueType, residual: ValueType) -> None:
    alike = (added.shape, added.dtype) == (residual.shape, residual.dtype)
    require(alike, "residual", f"{added} and {residual}", "terms of the same shape and dtype")


def _across(
    values: Any,
    kind: ValueType,
    result: ValueType,
    residuals: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    rank_biases: Sequence[torch.Tensor | None] = biases or [None] * len(residuals)
    return [
        all_reduce_residual(values, residual, bias, tree_sum)
        for residual, bias in zip(residuals, rank_biases, strict=True)
    ]


def _all_reduce_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost in a ring, as for all_reduce; the residual is read, the sum not written."""
    whole = local_bytes(operands[0].placed(REPLICATE), rank)
    return Cost(memory_bytes=2 * whole + local_bytes(result, rank), wire_bytes=2 * whole)


LINEAR_RESIDUAL = composite(linear_residual, check=_check_linear)
ALL_REDUCE_RESIDUAL = composite(
    all_reduce_residual, check=_check_all_reduce, cost=_all_reduce_cost, across=_across
)
