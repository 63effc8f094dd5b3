"""Attention of one new token per sequence to the cache, as a whole and in spans.

A span knows only its own maximum and sum. It therefore returns normalised values together with the
logarithm of the divisor (log-sum-exp), so that any number of spans can be merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tpcompile.ir.kv import loaded_rows
from tpcompile.ir.ops.attention import attention_cost, attention_localize, attention_rule
from tpcompile.ir.ops.cache import (
    check_blocks,
    check_cache,
    check_one_each,
    check_places,
    kept_type,
    stored_type,
)
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.ir.ops.composite import composite
from tpcompile.ir.ops.elementwise import SIGMOID_GATE
from tpcompile.ir.ops.groups import heads_read
from tpcompile.ir.ops.paged_attention import attend_rows, read_tokens
from tpcompile.ir.ops.shape import FLATTEN
from tpcompile.ir.ops.spec import Cost, define, refuse, require, streaming_cost
from tpcompile.ir.roles import QueriesOf, SpansOf
from tpcompile.ir.types import Partial, ValueType
from tpcompile.ir.values.attending import cached_value, partial_value, reduce_value


def cached_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    layer: int,
    block: int,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute `paged_attention` for one new token per sequence, which is in the cache already."""
    check_one_each(q, tables, lengths)
    keys, values = cache[layer]
    out = torch.empty_like(q)
    for row, (length, table) in enumerate(zip(lengths.tolist(), tables, strict=True)):
        first = 0 if window is None else max(0, length - window)
        k, v = (read_tokens(side, table, first, length, block) for side in (keys, values))
        rows = slice(row, row + 1)
        out[rows] = attend_rows(q[rows], k, v, scale, window, kv_heads)
    return out


def span_of(length: int, block: int, span: int, spans: int, window: int | None) -> tuple[int, int]:
    """Return the tokens of a sequence that a span sees: whole blocks, as evenly as possible.

    The last span is never empty; it contains the new token, which is the last.
    """
    blocks = -(-length // block)
    first = blocks * span // spans * block
    last = min(blocks * (span + 1) // spans * block, length)
    if window is not None:
        first = max(first, length - window)
    return first, max(first, last)


def partial_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    layer: int,
    block: int,
    spans: int,
    kv_heads: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each span's values `[T, heads, spans, width]` and log-sum-exp `[T, heads, spans]`.

    Both are in fp32. The log-sum-exp is natural and of the scaled scores; their maximum is
    subtracted before `exp` and added after `log`. An empty span has values of zero and a
    log-sum-exp of minus infinity.
    """
    check_one_each(q, tables, lengths)
    tokens, heads, width = q.shape
    values = q.new_zeros((tokens, heads, spans, width), dtype=torch.float32)
    lse = q.new_full((tokens, heads, spans), -torch.inf, dtype=torch.float32)
    read = heads_read(heads, cache.shape[-2], kv_heads)
    for row, (length, table) in enumerate(zip(lengths.tolist(), tables, strict=True)):
        for span in range(spans):
            first, last = span_of(length, block, span, spans, window)
            if first == last:
                continue
            k, v = (
                loaded_rows(read_tokens(side, table, first, last, block)[:, read]).float()
                for side in cache[layer]
            )
            scores = torch.einsum("hw,thw->ht", q[row].float(), k) * scale
            most = scores.amax(-1, keepdim=True)
            weights = (scores - most).exp()
            total = weights.sum(-1, keepdim=True)
            values[row, :, span] = torch.einsum("ht,thw->hw", weights, v) / total
            lse[row, :, span] = (most + total.log()).squeeze(-1)
    return values, lse


def merge_spans(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `[…, spans, width]` and `[…, spans]` into one span, in the fixed tree of `fold_tree`.

    The result is again a span with its log-sum-exp, so it can be merged further.
    """
    spans = list(zip(values.unbind(-2), lse.unbind(-1), strict=True))
    return fold_tree(spans, merge)


Span = tuple[torch.Tensor, torch.Tensor]
"""The values of a span, normalised, and their log-sum-exp."""


def merge(
    span: Span,
    other: Span,
    exp: Callable[[torch.Tensor], torch.Tensor] = torch.exp,
    log: Callable[[torch.Tensor], torch.Tensor] = torch.log,
) -> Span:
    """Merge two spans into one, with the given `exp` and `log`.

    Merging with an empty span is a no-op; two empty spans give an empty span.
    """
    (a, a_lse), (b, b_lse) = span, other
    most = torch.maximum(a_lse, b_lse)
    empty = most == -torch.inf
    level = most.where(~empty, 0)  # infinity minus infinity is NaN
    a_weight, b_weight = exp(a_lse - level), exp(b_lse - level)
    total = (a_weight + b_weight).where(~empty, 1)
    mixed = a * (a_weight / total).unsqueeze(-1) + b * (b_weight / total).unsqueeze(-1)
    return mixed, (level + log(total)).where(~empty, -torch.inf)


def attention_reduce(values: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Merge the values of all spans of each token, and round them to `dtype`."""
    mixed, total = merge_spans(values, lse)
    if bool((total == -torch.inf).any()):
        raise ValueError("all spans of a token are empty, but each token must see at least itself")
    return mixed.to(dtype, copy=True)


def gated_attention_reduce(
    values: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, gate: torch.Tensor
) -> torch.Tensor:
    """Merge the spans of each token, and multiply its heads, side by side, by their gates."""
    merged = FLATTEN(ATTENTION_REDUCE(values, lse, dtype), 1, 2)
    gated: torch.Tensor = SIGMOID_GATE(merged, gate)
    return gated


def _cached_rule(
    q: ValueType,
    cache: ValueType,
    tables: ValueType,
    lengths: ValueType,
    layer: int,
    block: int,
    **others: Any,
) -> ValueType:
    require(q.dims == 3, "attention", q, "q[T, heads, width]")
    check_cache(cache, layer, block)
    check_places(tables, lengths)
    plain = q.in_role(None)
    require(q.dtype == cache.dtype, "kv-cache", f"q {q}, cache {cache}", "the same dtype in both")
    keys = kept_type(cache, q.shape[0])
    result = attention_rule(plain, keys, keys, lengths, layer=layer, **others)
    _check_queries(q, cache, layer, block)
    return result


def _check_queries(q: ValueType, cache: ValueType, layer: int, block: int) -> None:
    """Refuse queries or a cache whose layer or block size differs from that of the attention."""
    wanted = QueriesOf(layer, block)
    check_blocks(cache, block)
    require(
        q.role == wanted,
        "kv-cache",
        f"q {q}, layer={layer}, block={block}",
        f"{wanted}, from the op that stored the keys and values of this layer",
    )


def _partial_rule(
    q: ValueType, layer: int, block: int, spans: int, **others: Any
) -> tuple[ValueType, ValueType]:
    """Infer types with the head layout of `q`; a rank holds all spans of its heads."""
    _cached_rule(q, layer=layer, block=block, **others)
    require(spans > 0, "spans", f"spans={spans}", "one span or more")
    shape = (*q.shape[:2], spans)
    values, lse = (
        ValueType(extents, torch.float32, q.placement, SpansOf(part, layer, block, spans))
        for part, extents in (("values", (*shape, q.shape[2])), ("lse", shape))
    )
    return values, lse


def _reduce_rule(values: ValueType, lse: ValueType, dtype: torch.dtype) -> ValueType:
    require(
        values.dims == 4 and lse.shape == values.shape[:3],
        "spans",
        f"values {values}, lse {lse}",
        "values[T, heads, spans, width] with lse[T, heads, spans]",
    )
    for kind in (values, lse):
        require(kind.dtype == torch.float32, "spans", kind, "partials in fp32")
        if isinstance(kind.placement, Partial):
            refuse(
                "partial-nonlinear", kind, "spans, which are merged by weight, not terms of a sum"
            )
        whole = kind.layout_of(2) is None
        require(whole, "whole-axis", kind, "every span of a head on one rank, to merge them")
    require(
        values.placement == lse.placement and values.layout_of(3) is None,
        "same-layout",
        f"values {values}, lse {lse}",
        "whole heads with the same layout in both",
    )
    _check_one_partial(values, lse)
    return ValueType((*values.shape[:2], values.shape[3]), dtype, values.placement)


def _check_one_partial(values: ValueType, lse: ValueType) -> None:
    """Refuse values and log-sum-exp that are not all spans of one partial_attention."""
    spans = values.role
    require(
        isinstance(spans, SpansOf)
        and (spans.part, spans.spans) == ("values", values.shape[2])
        and lse.role == replace(spans, part="lse"),
        "spans",
        f"values {values}, lse {lse}",
        "the values and the lse of one partial_attention, with all its spans",
    )


def _localize(result: Any, rank: int, q: ValueType, cache: ValueType, **_: Any) -> dict[str, Any]:
    return attention_localize(q, rank, q, kept_type(cache, q.shape[0]))


def _cost(result: Any, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of one token per token of context, as for attention."""
    q, cache = operands[:2]
    stored = stored_type(cache, q.shape[0])
    return attention_cost(q, [q, stored, stored], rank)


CACHED_ATTENTION = define(
    cached_attention,
    value=cached_value,
    fake=lambda q, *_, **__: torch.empty_like(q),
    rule=_cached_rule,
    cost=_cost,
    localize=_localize,
    takes_roles=True,
    in_formats=("cache",),
)
PARTIAL_ATTENTION = define(
    partial_attention,
    value=partial_value,
    fake=lambda q, cache, tables, lengths, scale, window, layer, block, spans, kv_heads=None: (
        q.new_empty((*q.shape[:2], spans, q.shape[2]), dtype=torch.float32),
        q.new_empty((*q.shape[:2], spans), dtype=torch.float32),
    ),
    rule=_partial_rule,
    cost=_cost,
    localize=_localize,
    takes_roles=True,
    in_formats=("cache",),
)
ATTENTION_REDUCE = define(
    attention_reduce,
    value=reduce_value,
    fake=lambda values, lse, dtype: values.new_empty(
        (*values.shape[:2], values.shape[3]), dtype=dtype
    ),
    rule=_reduce_rule,
    cost=streaming_cost,
    takes_roles=True,
)
GATED_ATTENTION_REDUCE = composite(gated_attention_reduce, takes_roles=True)
