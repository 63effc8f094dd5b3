"""Fused norm, QKV projection, rotation, and write of keys and values to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpcompile.ir.layout import FusedLayout
from tpcompile.ir.ops.cache import check_append, stored_type
from tpcompile.ir.ops.composite import Part, composite, known, optional
from tpcompile.ir.ops.decode.norm_linear import SPLIT, norm_linear
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.norm import RMS_NORM
from tpcompile.ir.ops.paged_attention import append_rows
from tpcompile.ir.ops.rotary import ROPE
from tpcompile.ir.ops.shape import UNFLATTEN
from tpcompile.ir.ops.spec import Cost, CostRule, local_bytes, numel, require
from tpcompile.ir.roles import QueriesOf
from tpcompile.ir.types import ValueType
from tpcompile.ir.values.attending import append_value


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
    zero_centered: bool = False,
) -> torch.Tensor:
    """Return the rotated queries `[T, heads[0], width]`; store keys and values in the cache.

    `weight` contains the rows of `heads` query, key and value heads, in this order. Keys are
    rotated like the queries, and stored with the values in `slots`. Each KV head is stored once;
    attention ops repeat it for their query heads. Per-head norms are applied before the rotation.
    `interleaved` gives the order of pairs within a head, as for `rope`.
    """
    rows = norm_linear(x, norm, eps, weight, bias, zero_centered)
    width = known(_width, rows.shape[1], heads)
    parts = SPLIT(rows, [heads[part] * width for part in range(3)], 1)
    q, k, v = (UNFLATTEN(parts[part], 1, [-1, width]) for part in range(3))
    q, k = _rotated(((q, q_norm), (k, k_norm)), head_eps, cos, sin, interleaved, zero_centered)
    queries: torch.Tensor = APPEND(q, k, v, cache, slots, layer, block)
    return queries


def norm_q_k_v_rope_append(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    head_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
    block: int,
    interleaved: bool = False,
    zero_centered: bool = False,
) -> torch.Tensor:
    """Compute `norm_qkv_rope_append` of queries, keys and values that have a weight each.

    The weights may differ in format.
    """
    normed = RMS_NORM(x, norm, eps, zero_centered)
    width = k_weight.shape[0] // cache.shape[-2]
    q, k, v = (
        UNFLATTEN(LINEAR(normed, weight, bias), 1, [-1, width])
        for weight, bias in ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    )
    q, k = _rotated(((q, q_norm), (k, k_norm)), head_eps, cos, sin, interleaved, zero_centered)
    queries: torch.Tensor = APPEND(q, k, v, cache, slots, layer, block)
    return queries


def _width(rows: int, heads: Sequence[int]) -> int:
    return rows // sum(heads)


def _rotated(
    sides: Sequence[tuple[Any, Any]],
    head_eps: float,
    cos: Any,
    sin: Any,
    interleaved: bool,
    zero_centered: bool,
) -> list[Any]:
    """Rotate queries and keys, each given with the norm of its heads."""
    return [
        ROPE(optional(RMS_NORM, side, scale, head_eps, zero_centered), cos, sin, interleaved)
        for side, scale in sides
    ]


def _append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
    block: int,
) -> torch.Tensor:
    """Store keys and values in the cache; return the queries, which may then be compared."""
    append_rows(k, v, cache, slots, layer)
    return q


def _append_rule(q: ValueType, *stored: Any) -> ValueType:
    """Return the type of queries for attention to the stored keys."""
    check_append(*stored)
    *_, layer, block = stored
    return q.in_role(QueriesOf(layer, block))


APPEND = Part(_append, _append_rule, append_value)
"""The write of a step's keys and values, with the arguments that `paged_attention` has, too."""


def _check(x: ValueType, cos: ValueType, heads: Sequence[int], **_: Any) -> None:
    require(x.dims == 2 and cos.dims == 2, "norm-qkv", f"{x} with {cos}", "x[T, hidden]")
    require(
        len(heads) == 3 and heads[1] == heads[2],
        "norm-qkv",
        f"heads={list(heads)}",
        "numbers of query, key and value heads, with as many key heads as value heads",
    )


def _localize(result: ValueType, rank: int, weight: ValueType, **_: Any) -> dict[str, Any]:
    """Return the number of heads of each kind on the rank."""
    layout = weight.layout_of(0)
    if not isinstance(layout, FusedLayout):
        return {}
    return {"heads": [segment.unit_count(rank) for segment in layout.segments]}


def _cost(weights: int) -> CostRule:
    """Return the cost of the projections and the cache write; norms and rotation are negligible."""

    def cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
        x, norm, *projected = operands[: 2 + weights]
        cache = next(kind for kind in operands if kind.dims == 5)
        flops = sum(2 * numel(weight.local_shape(rank)) for weight in projected)
        moved = [result, x, norm, *projected, *[stored_type(cache, x.shape[0])] * 2]
        return Cost(flops, sum(local_bytes(kind, rank) for kind in moved))

    return cost


_OPTIONS: dict[str, Any] = {
    "overwrites": ("cache",),
    "reasons": {
        "head_eps": "its head norms must have the same epsilon",
        "interleaved": "queries and keys are rotated in different layouts",
        "zero_centered": "its norms must all be zero-centred, or none of them",
    },
    "takes_roles": True,
    "in_formats": ("cache",),
}
NORM_QKV_ROPE_APPEND = composite(
    norm_qkv_rope_append, check=_check, cost=_cost(1), localize=_localize, **_OPTIONS
)
NORM_Q_K_V_ROPE_APPEND = composite(norm_q_k_v_rope_append, cost=_cost(3), **_OPTIONS)
QKV_OPS = (NORM_QKV_ROPE_APPEND, NORM_Q_K_V_ROPE_APPEND)
"""The ops that compute and store keys and values: with one weight, and with one each."""
