"""Causal grouped-query attention over packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.ops.groups import check_groups, check_whole_heads, local_map, runs_of
from tpcompile.ir.ops.head_order import is_interleaved
from tpcompile.ir.ops.spec import Cost, define, local_bytes, require, streaming_cost
from tpcompile.ir.types import REPLICATE, ValueType
from tpcompile.ir.values.attending import attention_value


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    layer: int,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute the attention of `q[T, heads, width]` to `k` and `v`.

    Sequence `i` consists of the tokens from `starts[i]` to `starts[i + 1]`. A token sees itself and
    the tokens before it in its sequence, or the last `window` of these. `kv_heads` gives the KV
    head that each query head reads; by default the query heads share the KV heads evenly, in order.
    """
    out = q.new_empty(q.shape)
    tokens = out.flatten(0, -3)  # before canonicalize there is a batch dimension of 1
    q, k, v = (heads.flatten(0, -3) for heads in (q, k, v))
    for start, stop in pairwise(starts.tolist()):
        rows = slice(start, stop)
        tokens[rows] = attend(q[rows], k[rows], v[rows], scale, window, kv_heads)
    return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute the attention of `q[n, heads, width]`, the last `n` tokens of one sequence."""
    if kv_heads is not None:
        return torch.cat(
            [
                attend(q[:, first : last + 1], k[:, head, None], v[:, head, None], scale, window)
                for head, first, last in runs_of(kv_heads)
            ],
            dim=1,
        )
    new, heads, width = q.shape
    length, shared = k.shape[:2]
    group = heads // shared
    if not new:
        return torch.empty_like(q)
    if new == 1:  # one row needs no mask, so the heads of a group can be rows
        visible = slice(0 if window is None else max(0, length - window), length)
        keys, values = (side[visible].transpose(0, 1).unsqueeze(0) for side in (k, v))
        query = q.view(1, shared, group, width)
        mixed = functional.scaled_dot_product_attention(query, keys, values, scale=scale)
        return mixed.reshape(1, heads, width)
    before = length - new
    parts = [
        _attend_rows(
            q[first:last].view(-1, shared, group, width),
            k[: before + last],
            v[: before + last],
            scale,
            window,
        )
        for first, last in pairwise([*range(0, new, _rows_at_once(q.device)), new])
    ]
    return torch.cat(parts).reshape(new, heads, width)


def _rows_at_once(device: torch.device) -> int:
    """Return the rows per chunk; the only wasted work is the scores above a chunk's diagonal."""
    return 128 if device.type == "cpu" else 1024


def _attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Compute the attention of `q[n, KV heads, group, width]`, the last `n` tokens in `k`."""
    new, shared, group, width = q.shape
    first = 0 if window is None else max(0, len(k) - new + 1 - window)
    keys, values = (side[first:].transpose(0, 1).unsqueeze(0) for side in (k, v))
    mask = causal_mask(new, len(k) - first, window, q.device)
    mixed = functional.scaled_dot_product_attention(  # heads of a group become rows
        q.permute(1, 2, 0, 3).reshape(1, shared, group * new, width),
        keys,
        values,
        mask.repeat(group, 1),
        scale=scale,
    )
    return mixed.view(shared, group, new, width).permute(2, 0, 1, 3)


def causal_mask(new: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a boolean mask: which of `length` tokens (columns) the last `new` tokens (rows) see.

    An additive mask would need infinities, and zero times infinity is NaN.
    """
    before = length - new
    mask = torch.ones(new, length, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before + 1 - window)


def attention_rule(
    q: ValueType,
    k: ValueType,
    v: ValueType,
    starts: ValueType,
    scale: float,
    window: int | None,
    layer: int,
    kv_heads: tuple[int, ...] | None = None,
) -> ValueType:
    require(q.dims >= 3, "attention", q, "q[T, heads, width]")
    require(
        window is None or window > 0,
        "attention",
        f"window={window}",
        "a window of one token or more",
    )
    tokens = q.shape[:-2]
    alike = k.in_role(None) == v.in_role(None)
    require(alike, "kv-alike", f"k {k}, v {v}", "keys and values of the same type and layout")
    require(
        k.shape[:-2] == tokens and k.shape[-1] == q.shape[-1] and k.dtype == q.dtype,
        "attention",
        f"q {q}, k {k}",
        "the same tokens, head width and dtype in both",
    )
    require(
        starts.placement == REPLICATE and starts.dtype == torch.int64,
        "attention",
        starts,
        "starts of int64 on every rank",
    )
    heads, shared = q.extent(-2), k.extent(-2)
    require(
        heads % shared == 0,
        "attention",
        f"{heads} query and {shared} KV heads",
        "query heads that share the KV heads evenly",
    )
    require(
        kv_heads is None,
        "kv-map",
        kv_heads,
        "no map, since each rank's map is derived from the layouts",
    )
    for kind in (q, k):
        check_whole_heads(kind, -2)
    orders = is_interleaved(q), is_interleaved(k)
    require(orders[0] == orders[1], "head-order", f"q {q}, k {k}", "the same head order in both")
    require(v.role is None, "head-order", f"v {v}", "values in the model's order")
    check_groups(q.layout_of(-2), k.layout_of(-2), heads // shared, "kv-heads", ("query", "KV"))
    return q.in_role(None)


def attention_localize(
    result: ValueType, rank: int, q: ValueType, k: ValueType, **_: Any
) -> dict[str, Any]:
    """Return the KV head that each query head of the rank reads, unless groups are even."""
    return local_map("kv_heads", q.layout_of(-2), k.layout_of(-2), k.extent(-2), rank)


def attention_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of one token per token of context; multiply it by the context length."""
    streaming = streaming_cost(result, operands, rank)
    elements = local_bytes(result, rank) // result.dtype.itemsize
    return Cost(flops=4 * elements, memory_bytes=streaming.memory_bytes)


ATTENTION = define(
    attention,
    fake=lambda q, *_, **__: torch.empty_like(q),
    rule=attention_rule,
    cost=attention_cost,
    localize=attention_localize,
    takes_roles=True,
    value=attention_value,
)
