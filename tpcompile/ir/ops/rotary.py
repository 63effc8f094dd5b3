"""Rotary position embedding: the tables, which come from the model, and the rotation.

A head is rotated in pairs of elements. Hugging Face stores the elements of a pair half a head
apart, `(i, i + half)`. Interleaved heads store them side by side, `(2i, 2i + 1)`, so that a row
block or a vector register holds whole pairs. Both use the tables in Hugging Face's order.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompile.ir.ops.elementwise import promoted, unary_rule
from tpcompile.ir.ops.head_order import is_interleaved
from tpcompile.ir.ops.reference import value_of_reference
from tpcompile.ir.ops.spec import SPECS, define, refuse, require, streaming_cost
from tpcompile.ir.types import REPLICATE, ValueType
from tpcompile.ir.values.build import called, without_batch
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import Value

ROTARY = "rotary"
"""The target of the only `call_module` node of a graph: the model's own rotary module.

Some rope types choose their frequencies by the longest position of the step, so the graph cannot
compute the tables itself; `captured.rotary` creates the module."""


def _no_tables(
    positions: torch.Tensor, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError(
        "tpc.rotary only marks the model's rotary module during capture and cannot be executed"
    )


def tables_rule(positions: ValueType, width: int, dtype: torch.dtype) -> tuple[ValueType, ...]:
    require(positions.placement == REPLICATE, "positions", positions, "positions on every rank")
    table = ValueType((*positions.shape, width), dtype)
    return table, table


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate every head of `x[T, heads, width]` by tables `[T, width]`.

    Narrower tables rotate only the first elements of a head.

    Pair `i` of a head is `(i, i + half)`, or `(2i, 2i + 1)` in interleaved heads. In both orders
    its first element uses column `i` of the tables and its second element column `i + half`, so
    the results agree even if the two halves of the tables differ.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        first = rope(x[..., :rotated], cos, sin, interleaved)
        return torch.cat([first, x[..., rotated:].to(first.dtype)], -1)
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        cos, sin = interleave(cos), interleave(sin)
    else:
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """Move the elements of each pair side by side, in heads or in the rows of a table."""
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).transpose(-2, -1).flatten(-2)


def split_halves(x: torch.Tensor) -> torch.Tensor:
    """Move the elements of each pair half a head apart: the inverse of `interleave`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-2, -1).flatten(-2)


def rope_rule(x: ValueType, cos: ValueType, sin: ValueType, interleaved: bool = False) -> ValueType:
    require(
        x.dims == 3 and cos == sin and cos.dims == 2 and cos.shape[0] == x.shape[0],
        "rope",
        f"{x} with {cos}",
        "x[T, heads, width] with tables [T, width]",
    )
    width, rotated = x.extent(2), cos.extent(1)
    pairs = rotated % 2 == 0
    require(pairs, "rope", cos, "tables of an even width, since heads are rotated in pairs")
    fits = rotated == width or (rotated < width and not interleaved)
    require(
        fits,
        "rope",
        f"{x} with {cos}",
        "tables as wide as a head, or narrower for heads that are not interleaved",
    )
    if x.layout_of(2) is not None:
        refuse("whole-heads", x, "the whole head on one rank, to rotate it")
    require(
        x.layout_of(0) == cos.layout_of(0),
        "rope",
        f"{x} with {cos}",
        "the same token layout in both",
    )
    require(cos.layout_of(1) is None, "rope", cos, "whole tables")
    require(
        is_interleaved(x) == interleaved,
        "head-order",
        f"interleaved={interleaved} for {x}",
        "heads in the order that the rotation assumes",
        "the pass interleave-rotary changes head parameters and rotations together",
    )
    whole = unary_rule(cos), unary_rule(x)
    return ValueType(x.shape, promoted(x, cos), whole[1].placement, x.role)


def rope_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool, wide: bool
) -> torch.Tensor:
    """Rotate adjacent elements of every head, as the models of GLM and Cohere define their heads.

    The tables have a column per element, as Cohere's. If they have `halves`, as Llama's, their
    first half has a column per pair. With `wide`, the rotation is computed in fp32. As in `rope`,
    narrower tables rotate only the first elements of a head.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        first = rope_pairs(x[..., :rotated], cos, sin, halves, wide)
        return torch.cat([first, x[..., rotated:]], -1)
    if halves:
        cos, sin = (table[..., : rotated // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    heads = x.float() if wide else x
    turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2)
    return (heads * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


def rope_pairs_rule(
    x: ValueType, cos: ValueType, sin: ValueType, halves: bool, wide: bool
) -> ValueType:
    require(wide or x.dtype == cos.dtype, "rope", f"{x} with {cos}", "tables of the dtype of x")
    return replace(rope_rule(x, cos, sin), dtype=x.dtype)


def _tables_value(
    scope: Scope, positions: Value, width: int, dtype: torch.dtype
) -> tuple[Value, ...]:
    bound = {"positions": without_batch(positions, 1), "width": width}
    table = (*positions.shape, width), dtype
    return called(scope.terms, "tpc.rotary", bound | {"dtype": dtype}, table, table)


TABLES = define(
    _no_tables,
    value=_tables_value,
    name="rotary",
    fake=lambda positions, width, dtype: (
        positions.new_empty((*positions.shape, width), dtype=dtype),
        positions.new_empty((*positions.shape, width), dtype=dtype),
    ),
    rule=tables_rule,
    cost=streaming_cost,
)
_rotated = value_of_reference(rope)


def _rope_value(scope: Scope, interleaved: bool = False, **operands: Value) -> Value:
    """Return the expression of rotated heads; attention reads interleaved ones in the old order."""
    value: Value = _rotated(scope, interleaved=interleaved, **operands)
    return replace(value, interleaved=interleaved)


ROPE = define(rope, rule=rope_rule, cost=streaming_cost, takes_roles=True, value=_rope_value)
ROPE_PAIRS = define(
    rope_pairs, rule=rope_pairs_rule, cost=streaming_cost, value=value_of_reference(rope_pairs)
)

SPECS[ROTARY] = replace(SPECS[TABLES], target=ROTARY)
