"""Elementwise ops: sums, products, activations, casts and the fused SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.spec import Rule, declare, refuse, require, streaming_cost
from tpcompile.ir.types import PARTIAL, REPLICATE, Dim, Partial, Placement, Shard, ValueType
from tpcompile.ir.values.build import ValueRule, cast, elementwise
from tpcompile.ir.values.node import is_exact

aten = torch.ops.aten


def broadcast(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the shape to which torch broadcasts these shapes."""
    width = max(len(shape) for shape in shapes)
    result: list[Dim] = []
    for column in zip(*((1,) * (width - len(s)) + s for s in shapes), strict=True):
        extents = {extent for extent in column if extent != 1}
        require(len(extents) <= 1, "broadcast", shapes, "shapes that can be broadcast together")
        result.append(extents.pop() if extents else 1)
    return tuple(result)


def join(shape: tuple[Dim, ...], operands: list[ValueType]) -> Placement:
    """Return the placement of the result of a non-linear elementwise op."""
    for kind in operands:
        if isinstance(kind.placement, Partial):
            refuse(
                "partial-nonlinear",
                kind,
                "an operand that is already summed",
                "only linear ops accept a Partial: put the all_reduce before this node",
            )
    sharded = {_aligned(kind, shape) for kind in operands if isinstance(kind.placement, Shard)}
    if not sharded:
        return REPLICATE
    require(
        len(sharded) == 1,
        "same-layout",
        " and ".join(map(str, operands)),
        "operands with the same layout on the same dimension",
    )
    (placement,) = sharded
    for kind in operands:
        dim = placement.dim - len(shape) + kind.dims
        whole = isinstance(kind.placement, Shard) or dim < 0 or kind.shape[dim] == 1
        require(
            whole,
            "same-layout",
            f"{kind} with {placement}",
            "every operand sharded alike, or broadcast along that dimension",
        )
    return placement


def _aligned(kind: ValueType, shape: tuple[Dim, ...]) -> Shard:
    assert isinstance(kind.placement, Shard)
    return Shard(kind.placement.dim + len(shape) - kind.dims, kind.placement.layout)


def promoted(first: ValueType, second: ValueType | float) -> torch.dtype:
    """Return torch's result dtype; a value without dimensions has a lower priority than others."""
    operands: list[Any] = [
        torch.empty((1,) * min(k.dims, 1), dtype=k.dtype, device="meta")
        if isinstance(k, ValueType)
        else k
        for k in (first, second)
    ]
    return torch.result_type(*operands)


def _pointwise(first: ValueType, *others: ValueType) -> ValueType:
    operands = [first, *others]
    shape = broadcast(*(kind.shape for kind in operands))
    dtype = promoted(first, others[0]) if others else first.dtype
    return ValueType(shape, dtype, join(shape, operands))


def unary_rule(self: ValueType) -> ValueType:
    require(self.dtype.is_floating_point, "floating", self, "a floating-point value")
    return _pointwise(self)


def gelu_rule(self: ValueType, approximate: str) -> ValueType:
    known = ("none", "tanh")
    require(approximate in known, "gelu", f"approximate={approximate!r}", " or ".join(known))
    return unary_rule(self)


def power_rule(self: ValueType, exponent: float) -> ValueType:
    return ValueType(self.shape, promoted(self, exponent), _pointwise(self).placement)


def negate_rule(self: ValueType) -> ValueType:
    return self if isinstance(self.placement, Partial) else _pointwise(self)


def product_rule(self: ValueType, other: ValueType | float) -> ValueType:
    if not isinstance(other, ValueType):
        return ValueType(self.shape, promoted(self, other), self.placement)
    for terms, factor in ((self.placement, other.placement), (other.placement, self.placement)):
        if isinstance(terms, Partial) and factor == REPLICATE:  # a factor of each term
            return ValueType(broadcast(self.shape, other.shape), promoted(self, other), terms)
    return _pointwise(self, other)


def quotient_rule(self: ValueType, other: ValueType | float) -> ValueType:
    require(self.dtype.is_floating_point, "floating", self, "a floating-point value")
    if isinstance(other, ValueType) and isinstance(other.placement, Partial):
        return _pointwise(self, other)  # refuses it: x / (a + b) is not x / a + x / b
    return product_rule(self, other)


def sum_rule(self: ValueType, other: ValueType | float, alpha: float = 1) -> ValueType:
    require(alpha == 1, "plain-add", f"alpha={alpha}", "alpha=1")
    if not isinstance(other, ValueType):
        return ValueType(self.shape, promoted(self, other), _pointwise(self).placement)
    if isinstance(self.placement, Partial) and isinstance(other.placement, Partial):
        require(self.shape == other.shape, "broadcast", (self, other), "terms of the same shape")
        return ValueType(self.shape, promoted(self, other), PARTIAL)
    return _pointwise(self, other)


def cast_rule(self: ValueType, dtype: torch.dtype, **_: Any) -> ValueType:
    if isinstance(self.placement, Partial):
        require(
            self.placement.disjoint or is_exact(self.dtype, dtype),
            "rounded-terms",
            f"a cast to {dtype_name(dtype)} of {self}, which is still a sum of terms",
            "a cast of the sum",
            "put the cast after the collective that adds the terms: here it rounds the term of "
            "each rank",
            self,
        )
        return ValueType(self.shape, dtype, self.placement)
    return ValueType(self.shape, dtype, _pointwise(self).placement)


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    silu: Callable[[torch.Tensor], torch.Tensor] = aten.silu.default,
) -> torch.Tensor:
    """Compute silu(gate) · up with the given `silu`."""
    return silu(gate) * up


def _check_swiglu(gate: ValueType, up: ValueType) -> None:
    require(gate.shape == up.shape, "swiglu", f"{gate} and {up}", "gate and up of the same shape")


def softplus_rule(self: ValueType, beta: float = 1, threshold: float = 20) -> ValueType:
    require((beta, threshold) == (1, 20), "softplus", (beta, threshold), "torch's defaults")
    return unary_rule(self)


def cast_like_rule(self: ValueType, other: ValueType) -> ValueType:
    return cast_rule(self, other.dtype)


def sigmoid_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    sigmoid: Callable[[torch.Tensor], torch.Tensor] = aten.sigmoid.default,
) -> torch.Tensor:
    """Compute x · sigmoid(gate), the output gate of an attention, with the given `sigmoid`."""
    return x * sigmoid(gate)


def _check_gate(x: ValueType, gate: ValueType) -> None:
    require(x == gate, "sigmoid-gate", f"{x} and {gate}", "a gate of the type of the value")


_RULES: dict[Any, Rule] = {
    aten.add.Tensor: sum_rule,
    aten.sub.Tensor: sum_rule,
    aten.mul.Tensor: product_rule,
    aten.div.Tensor: quotient_rule,
    aten.neg.default: negate_rule,
    aten.silu.default: unary_rule,
    aten.gelu.default: gelu_rule,
    aten.relu.default: unary_rule,
    aten.tanh.default: unary_rule,
    aten.square.default: unary_rule,
    aten.rsqrt.default: unary_rule,
    aten.pow.Tensor_Scalar: power_rule,
    aten.to.dtype: cast_rule,
    aten.type_as.default: cast_like_rule,
    aten.exp.default: unary_rule,
    aten.sigmoid.default: unary_rule,
    aten.softplus.default: softplus_rule,
}
_CASTS: dict[Any, ValueRule] = {
    aten.to.dtype: lambda scope, **bound: cast(scope.terms, bound["self"], bound["dtype"]),
    aten.type_as.default: lambda scope, **bound: cast(
        scope.terms, bound["self"], bound["other"].dtype
    ),
}
for _target, _rule in _RULES.items():
    _value = _CASTS.get(_target) or elementwise(_target.__name__.partition(".")[0])
    declare(_target, _rule, streaming_cost, value=_value)

SWIGLU = composite(swiglu, check=_check_swiglu)
SIGMOID_GATE = composite(sigmoid_gate, check=_check_gate)

ELEMENTWISE = frozenset(_RULES)
"""The ATen ops that compute each element of the result from one element of each operand."""

ACTIVATIONS = (
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.sigmoid.default,
)
"""The activation ops of MLPs; other activations are composed of these."""
