"""RMS norm, also with an addition or a gate, layer norm, and the means of captured norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.ops.elementwise import promoted, sum_rule, unary_rule
from tpcompile.ir.ops.reference import value_of_reference
from tpcompile.ir.ops.spec import declare, define, dim_of, refuse, require, streaming_cost
from tpcompile.ir.types import REPLICATE, Partial, ValueType
from tpcompile.ir.values.build import cast, reduced
from tpcompile.ir.values.scope import Rewrite, Scope
from tpcompile.ir.values.value import OpaqueError, Value

aten = torch.ops.aten


def normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide `x` by its root mean square over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool = False,
    normalized: Callable[[torch.Tensor, float], torch.Tensor] = normalized,
) -> torch.Tensor:
    """Normalise in fp32 with the given `normalized`, and round where Hugging Face rounds.

    If it is `zero_centered`, the scale is `1 + weight`, and only the product is rounded.
    """
    return _scaled(normalized(x.float(), eps), weight, x.dtype, zero_centered)


def _scaled(
    wide: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, zero_centered: bool
) -> torch.Tensor:
    if zero_centered:
        return (wide * (1 + weight.float())).to(dtype)
    return weight * wide.to(dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normed residual sum and the sum itself, both in the dtype of `x`.

    If `residual` is a sum in fp32, the norm sees the total before it is rounded.
    """
    total = x + residual
    wide = normalized(total.float(), eps)
    return _scaled(wide, weight, x.dtype, zero_centered), total.to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    silu: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
) -> torch.Tensor:
    """Normalise each head of `x`, and multiply it by the given `silu` of its gate in fp32."""
    return (rms_norm(x, weight, eps) * silu(gate.float())).to(x.dtype)


def _check_normalised(x: ValueType) -> None:
    if x.layout_of(-1) is not None:
        refuse(
            "norm-axis",
            x,
            "the normalised dimension whole on every rank",
            "the mean over one rank's part is not the mean of the whole: gather the value first",
        )


def rms_norm_rule(
    x: ValueType, weight: ValueType, eps: float, zero_centered: bool = False
) -> ValueType:
    _check_normalised(x)
    require(weight.placement == REPLICATE, "norm-weight", weight, "a replicated weight")
    require(
        weight.shape == x.shape[-1:],
        "norm-weight",
        weight,
        f"shape {x.shape[-1:]}",
        "a per-head norm needs a whole head, a layer norm the whole width",
    )
    require(
        x.role == weight.role,
        "head-order",
        f"{x} with the scale {weight}",
        "a head and its scale in the same order",
    )
    dtype = x.dtype if zero_centered else promoted(weight, x)
    return ValueType(x.shape, dtype, unary_rule(x).placement, x.role)


def gated_rms_norm_rule(x: ValueType, gate: ValueType, weight: ValueType, eps: float) -> ValueType:
    normed = rms_norm_rule(x, weight, eps)
    require(gate == x, "gated-norm", f"{x} with the gate {gate}", "a gate of the type of the heads")
    return ValueType(x.shape, x.dtype, normed.placement)


def add_rms_norm_rule(
    x: ValueType,
    residual: ValueType,
    weight: ValueType,
    eps: float,
    zero_centered: bool = False,
) -> tuple[ValueType, ValueType]:
    require(x.shape == residual.shape, "add-norm", f"{x} and {residual}", "terms of the same shape")
    total = ValueType(x.shape, x.dtype, sum_rule(x, residual).placement)
    return rms_norm_rule(total, weight, eps, zero_centered), total


def layer_norm_rule(
    input: ValueType,
    normalized_shape: tuple[int, ...],
    weight: ValueType | None = None,
    bias: ValueType | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ValueType:
    _check_normalised(input)
    last = input.shape[-1:]
    require(tuple(normalized_shape) == last, "layer-norm", normalized_shape, f"the extents {last}")
    for parameter in filter(None, (weight, bias)):
        require(
            parameter == ValueType(last, input.dtype),
            "norm-weight",
            parameter,
            f"a replicated parameter of shape {last} in {input.dtype}",
        )
    return unary_rule(input)


def mean_rule(
    self: ValueType,
    dim: tuple[int, ...] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> ValueType:
    if not dim or dtype is not None:
        refuse("mean", f"dim={dim}, dtype={dtype}", "explicit dimensions, and no dtype argument")
    dims = {dim_of(self, d) for d in dim}
    for d in dims:
        if self.layout_of(d) is not None:
            refuse("norm-axis", self, f"dimension {d} whole on every rank, to take its mean")
    if isinstance(self.placement, Partial):
        refuse("partial-nonlinear", self, "an operand that is already summed")
    require(keepdim, "mean", "keepdim=False", "keepdim=True")
    shape = tuple(1 if d in dims else extent for d, extent in enumerate(self.shape))
    return ValueType(shape, self.dtype, self.placement)


def _mean_value(scope: Scope, self: Value, dim: Any, **options: Any) -> Value:
    if [axis % self.dims for axis in dim] != [self.dims - 1]:
        raise OpaqueError("a mean over other axes than the last one")
    return reduced(scope.terms, "mean", self, self.dtype)


def standardized(
    input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, cudnn_enable: bool = True
) -> Any:
    """Compute a layer norm from ops, in fp32 and rounded once, as torch does."""
    wide = input.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    scaled = normed if weight is None else weight.float() * normed
    return (scaled if bias is None else scaled + bias.float()).to(input.dtype)


NORM_BEFORE_ROUNDING = Rewrite(
    "norm-before-rounding", "the norm of a sum may see the sum before it is rounded"
)
_added_and_normed = value_of_reference(add_rms_norm)
_normed = value_of_reference(rms_norm)


def _add_rms_norm_value(scope: Scope, x: Value, residual: Value, **norm: Any) -> tuple[Value, ...]:
    if not scope.allows(NORM_BEFORE_ROUNDING):
        outputs: tuple[Value, ...] = _added_and_normed(scope, x=x, residual=residual, **norm)
        return outputs
    total = scope.interpret(aten.add.Tensor, (x, residual))
    rounded = cast(scope.terms, total, x.dtype)
    return _normed(scope, x=rounded, **norm), rounded


declare(aten.mean.dim, mean_rule, streaming_cost, value=_mean_value)
declare(
    aten.layer_norm.default,
    layer_norm_rule,
    streaming_cost,
    value=value_of_reference(standardized),
)

RMS_NORM = define(
    rms_norm,
    rule=rms_norm_rule,
    cost=streaming_cost,
    takes_roles=True,
    value=_normed,
)
ADD_RMS_NORM = define(
    add_rms_norm,
    rule=add_rms_norm_rule,
    cost=streaming_cost,
    value=_add_rms_norm_value,
)
GATED_RMS_NORM = define(
    gated_rms_norm,
    rule=gated_rms_norm_rule,
    cost=streaming_cost,
    value=value_of_reference(gated_rms_norm),
)
