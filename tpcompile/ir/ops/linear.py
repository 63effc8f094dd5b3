"""The linear op, with its column-parallel and row-parallel placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpcompile.ir.ops.spec import Cost, declare, local_bytes, numel, refuse, require
from tpcompile.ir.roles import HeadParts
from tpcompile.ir.types import PARTIAL, REPLICATE, Partial, Placement, Shard, ValueType
from tpcompile.ir.values.build import linear
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import Value

aten = torch.ops.aten


def linear_rule(input: ValueType, weight: ValueType, bias: ValueType | None = None) -> ValueType:
    require(
        weight.dims == 2 and weight.shape[1] == input.shape[-1],
        "linear-shape",
        f"{input} times {weight}",
        "the same number of input features in both",
    )
    if bias is not None:
        require(bias.shape == weight.shape[:1], "linear-shape", bias, f"shape {weight.shape[:1]}")
        require(
            bias.role == weight.role,
            "head-order",
            f"bias {bias} with weight {weight}",
            "the rows of both in the same order",
        )
    require(input.role is None, "head-order", input, "input features in the model's order")
    dtypes = {kind.dtype for kind in (input, weight, bias) if kind is not None}
    require(
        len(dtypes) == 1, "linear-shape", f"{input} times {weight}", "operands of the same dtype"
    )
    shape = (*input.shape[:-1], weight.shape[0])
    placement = _linear_placement(input, weight, bias)
    if isinstance(placement, Shard) and placement.dim < 0:
        placement = Shard(placement.dim + len(shape), placement.layout)
    role = None if isinstance(weight.role, HeadParts) else weight.role
    return ValueType(shape, input.dtype, placement, role)


def _linear_placement(input: ValueType, weight: ValueType, bias: ValueType | None) -> Placement:
    features = input.layout_of(-1)
    rows, columns = weight.layout_of(0), weight.layout_of(1)
    if features is not None or columns is not None:
        return _row_parallel(input, weight, bias)
    if isinstance(weight.placement, Partial):
        refuse("partial-weight", weight, "a weight that is Replicate or Shard")
    if bias is not None and isinstance(bias.placement, Partial):
        refuse("bias-layout", bias, "a bias that is Replicate or Shard")
    if isinstance(input.placement, Partial):
        require(
            rows is None and bias is None,
            "partial-linear",
            f"{input} times {weight}",
            "a replicated weight and no bias, or an input that is already summed",
            "put the all_reduce before this linear",
        )
        return PARTIAL
    if bias is not None and bias.layout_of(0) != rows:
        refuse(
            "bias-layout",
            f"bias {bias} with weight {weight}",
            "a bias split like the rows of its weight",
        )
    if rows is None:
        return input.placement
    require(
        input.placement == REPLICATE,
        "column-parallel",
        input,
        "an input that is whole on every rank",
        "gather the input of a column-parallel linear",
    )
    return Shard(-1, rows)


def _row_parallel(input: ValueType, weight: ValueType, bias: ValueType | None) -> Placement:
    """Return the placement for a split contraction: each rank computes a term of the sum."""
    features, columns = input.layout_of(-1), weight.layout_of(1)
    if features != columns or features is None:
        refuse(
            "contraction-layout",
            f"input {input} ({_parts(features)}) times weight {weight} ({_parts(columns)})",
            "input features and weight columns with the same layout",
            "split the weight along dimension 1 by the layout of its input",
        )
    overlap = features.overlap()
    if overlap:
        refuse(
            "contraction-layout", overlap, "disjoint parts, since shared terms would count twice"
        )
    if bias is not None:
        refuse(
            "bias-once",
            f"bias {bias} on every rank",
            "no bias before the sum",
            "a row-parallel linear adds its bias once, after the all_reduce",
        )
    return PARTIAL


def _parts(layout: object) -> str:
    """Return the units of each rank as text, such as `units 0:3 | 3:6`."""
    if not hasattr(layout, "parts"):
        return str(getattr(layout, "segments", layout or "whole"))
    runs = ("+".join(f"{start}:{stop}" for start, stop in part) for part in layout.parts)
    return f"units {' | '.join(runs)}"


def linear_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    weight = operands[1].local_shape(rank)
    moved = sum(local_bytes(kind, rank) for kind in (result, *operands))
    return Cost(flops=2 * numel(weight), memory_bytes=moved)


def _linear_value(scope: Scope, input: Value, weight: Value, bias: Value | None = None) -> Value:
    return linear(scope.terms, input, weight, bias)


LINEAR = declare(
    aten.linear.default,
    linear_rule,
    linear_cost,
    takes_roles=True,
    in_formats=("weight",),
    value=_linear_value,
)
