"""Fused norm, QKV projection, rotation, and write of keys and values to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.layout import FusedLayout
from tpcompile.ir.ops.cache import check_append, kept_type
from tpcompile.ir.ops.linear import linear_cost, linear_rule
from tpcompile.ir.ops.norm import rms_norm, rms_norm_rule
from tpcompile.ir.ops.parts import split_rule
from tpcompile.ir.ops.rotary import rope, rope_rule
from tpcompile.ir.ops.shape import unflatten_rule
from tpcompile.ir.ops.spec import Cost, define, local_bytes, require
from tpcompile.ir.roles import QueriesOf
from tpcompile.ir.types import ValueType


def norm_qkv_rope_append(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    head_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
    block: int,
    heads: Sequence[int],
    interleaved: bool = False,
) -> torch.Tensor:
    """Return the rotated queries `[T, heads[0], width]`; store keys and values in the cache.

    `weight` contains the rows of `heads` query, key and value heads, in this order. Keys are
    rotated like the queries, and stored with the values in `slots`. Each KV head is stored once;
    attention ops repeat it for their query heads. Per-head norms are applied before the rotation.
    `interleaved` gives the order of pairs within a head, as for `rope`.
    """
    width = cos.shape[-1]
    rows = functional.linear(rms_norm(x, norm, eps), weight, bias)
    parts = torch.split(rows, [count * width for count in heads], -1)
    q, k, v = (part.reshape(len(x), -1, width) for part in parts)
    q = q if q_norm is None else rms_norm(q, q_norm, head_eps)
    k = k if k_norm is None else rms_norm(k, k_norm, head_eps)
    for side, kept in enumerate((rope(k, cos, sin, interleaved), v)):
        cache[layer, side].index_copy_(0, slots, kept)
    return rope(q, cos, sin, interleaved)


def _rule(
    x: ValueType,
    norm: ValueType,
    eps: float,
    weight: ValueType,
    bias: ValueType | None,
    q_norm: ValueType | None,
    k_norm: ValueType | None,
    head_eps: float,
    cos: ValueType,
    sin: ValueType,
    cache: ValueType,
    slots: ValueType,
    layer: int,
    block: int,
    heads: tuple[int, ...],
    interleaved: bool = False,
) -> ValueType:
    """Apply the rules of the component ops in order."""
    require(x.dims == 2 and cos.dims == 2, "norm-qkv", f"{x} with {cos}", "x[T, hidden]")
    require(
        len(heads) == 3 and heads[1] == heads[2],
        "norm-qkv",
        f"heads={list(heads)}",
        "numbers of query, key and value heads, with as many key heads as value heads",
    )
    rows = linear_rule(rms_norm_rule(x, norm, eps), weight, bias)
    width = cos.shape[1]
    assert isinstance(width, int)
    parts = split_rule(rows, tuple(count * width for count in heads), 1)
    q, k, v = (unflatten_rule(part, 1, (-1, width)) for part in parts)
    q = q if q_norm is None else rms_norm_rule(q, q_norm, head_eps)
    k = k if k_norm is None else rms_norm_rule(k, k_norm, head_eps)
    q, k = (rope_rule(side, cos, sin, interleaved) for side in (q, k))
    check_append(k, v, cache, slots, layer, block)
    return q.in_role(QueriesOf(layer, block))


def _localize(
    result: ValueType, rank: int, weight: ValueType, cos: ValueType, **_: Any
) -> dict[str, Any]:
    """Return the number of heads of each kind on the rank."""
    layout, width = weight.layout_of(0), cos.shape[1]
    if not isinstance(layout, FusedLayout):
        return {}
    assert isinstance(width, int)
    return {"heads": [segment.extent(rank) // width for segment in layout.segments]}


def _cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of the projection and the cache write; norms and rotation are negligible."""
    x, norm, weight = operands[:3]
    cache = next(kind for kind in operands if kind.dims == 5)
    projected = linear_cost(result, [x, weight, norm], rank)
    kept = 2 * local_bytes(kept_type(cache, x.shape[0]), rank)
    return Cost(flops=projected.flops, memory_bytes=projected.memory_bytes + kept)


NORM_QKV_ROPE_APPEND = define(
    norm_qkv_rope_append,
    overwrites=("cache",),
    rule=_rule,
    cost=_cost,
    localize=_localize,
    takes_roles=True,
)
