"""Rotary position embedding: the tables, which are the model's own, and the rotation.

A head is rotated in pairs of numbers. Hugging Face keeps the two of a pair half a head apart,
`(i, i + half)`; interleaved heads have them side by side, `(2i, 2i + 1)`, so that a row block or
a vector register holds whole pairs. The tables are Hugging Face's in both layouts.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from tpcompile.ir.ops.elementwise import promoted, unary_rule
from tpcompile.ir.ops.head_order import is_interleaved
from tpcompile.ir.ops.spec import SPECS, OpSpec, define, refuse, require, streaming_cost
from tpcompile.ir.types import REPLICATE, ValueType

ROTARY = "rotary"
"""Target of the one `call_module` node of a graph: the model's own table maker.

Some rope types choose their frequencies by the longest position of the step, so the tables
are no function that the graph could hold; `captured.rotary` makes the module."""


def _no_tables(positions: torch.Tensor, width: int, dtype: torch.dtype) -> NoReturn:
    raise RuntimeError("tpc.rotary only marks the model's rotary module while it is captured")


def tables_rule(positions: ValueType, width: int, dtype: torch.dtype) -> tuple[ValueType, ...]:
    require(positions.placement == REPLICATE, "positions", positions, "positions on every rank")
    table = ValueType((*positions.shape, width), dtype)
    return table, table


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate every head of `x[T, heads, width]` by tables `[T, width]`.

    The pair `i` of a head is `(i, i + half)`, or `(2i, 2i + 1)` in interleaved heads. Of the tables
    its first number takes column `i` and its second column `i + half` in either layout, so tables
    whose halves differ mean the same in both.
    """
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        cos, sin = interleave(cos), interleave(sin)
    else:
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """The numbers of each head, or of a table, with the two of a pair side by side."""
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).transpose(-2, -1).flatten(-2)


def split_halves(x: torch.Tensor) -> torch.Tensor:
    """What was interleaved, as Hugging Face has it: the two of a pair half a head apart."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-2, -1).flatten(-2)


def rope_rule(x: ValueType, cos: ValueType, sin: ValueType, interleaved: bool = False) -> ValueType:
    require(
        x.dims == 3 and cos == sin and cos.shape == (x.shape[0], x.shape[2]),
        "rope",
        f"{x} with {cos}",
        "x[T, heads, width] with tables [T, width]",
    )
    width = x.shape[2]
    pairs = isinstance(width, int) and width % 2 == 0
    require(pairs, "rope", x, "heads of an even width, as they are rotated in pairs")
    if x.layout_of(2) is not None:
        refuse("whole-heads", x, "the whole head on one rank, to rotate it")
    require(x.layout_of(0) == cos.layout_of(0), "rope", f"{x} with {cos}", "the same tokens")
    require(cos.layout_of(1) is None, "rope", cos, "whole tables")
    require(
        is_interleaved(x) == interleaved,
        "head-order",
        f"interleaved={interleaved} of {x}",
        "heads whose pairs are where the rotation takes them to be",
        "interleave-rotary changes the parameters of heads and their rotation together",
    )
    whole = unary_rule(cos), unary_rule(x)
    return ValueType(x.shape, promoted(x, cos), whole[1].placement, x.role)


TABLES = define(
    "rotary(Tensor positions, int width, ScalarType dtype) -> (Tensor, Tensor)",
    reference=_no_tables,
    fake=lambda positions, width, dtype: (
        positions.new_empty((*positions.shape, width), dtype=dtype),
        positions.new_empty((*positions.shape, width), dtype=dtype),
    ),
    rule=tables_rule,
    cost=streaming_cost,
)
ROPE = define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    reference=rope,
    fake=lambda x, cos, sin, interleaved=False: torch.empty_like(x),
    rule=rope_rule,
    cost=streaming_cost,
    takes_roles=True,
)

SPECS[ROTARY] = OpSpec(
    name="tpc.rotary",
    target=ROTARY,
    rule=tables_rule,
    cost=streaming_cost,
    reference=_no_tables,
    argument_names=("positions", "width", "dtype"),
)
