"""Expressions of attention: to keys and values, and to a cache that the step has written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpcompile.ir.values.build import called, without_batch
from tpcompile.ir.values.index import divided, plus, times
from tpcompile.ir.values.node import Term
from tpcompile.ir.values.scope import LayerState, Rewrite, Scope
from tpcompile.ir.values.value import Value, coordinates, extent_of, own_indices, viewed

ATTENTION = "tpc.attention"
STORED = "stored keys and values"
CACHED = "attention to a cache"
SPANS = "spans"
WITHOUT_PAST = Rewrite(
    "without-past",
    "attention to a cache is attention to the keys and values of the step, if these are all that "
    "the sequences have, up to the rounding of the cache's format",
    adds_states=True,
)
ONE_NEW_TOKEN = Rewrite(
    "one-new-token", "each sequence has one new token, and the input `starts` says so"
)
KEYS_IN_ANY_ORDER = Rewrite(
    "keys-in-any-order",
    "a cache may keep the elements of the heads of keys in another order, if all steps do",
    reorders_states=True,
)
SPANS_MERGED = Rewrite(
    "spans-merged", "the merged spans of an attention are the attention, but for rounding"
)


def attention_value(
    scope: Scope, q: Value, k: Value, v: Value, starts: Value, layer: int, **options: Any
) -> Value:
    """Return the attention of heads `[T, heads, width]`; `layer` only names it."""
    if q.interleaved and k.interleaved:
        q, k = in_order(scope, q), in_order(scope, k)
    heads = {name: without_batch(value, 3) for name, value in zip("qkv", (q, k, v), strict=True)}
    bound = {**heads, "starts": starts, **_options(options)}
    (result,) = called(scope.terms, ATTENTION, bound, (q.shape, q.dtype))
    return result


def in_order(scope: Scope, value: Value) -> Value:
    """Return heads with their elements in the model's order, given interleaved ones.

    Attention adds products of elements of a query and a key, whose order is the same in both.
    """
    indices = coordinates(value.shape)
    place, half = divided(indices[-1], extent_of(value.shape[-1]) // 2)[::-1]
    indices[-1] = plus(times(place, 2), half)
    return replace(viewed(scope.terms, value, value.shape, indices), interleaved=False)


def append(
    scope: Scope, k: Value, v: Value, cache: Value, slots: Value, layer: int, block: int
) -> None:
    """Write the keys and values of the step to a layer of the cache."""
    before, terms = scope.state(cache, layer), scope.terms
    keys = in_order(scope, k) if k.interleaved else k
    operands = [terms.whole(value.shape, value.body) for value in (keys, v, slots)]
    term = terms.call((STORED, layer, block), [*operands, before.term])
    written = (keys, v) if before.initial else ()
    scope.write(cache, layer, LayerState(term, k.interleaved, written))


def append_value(
    scope: Scope,
    q: Value,
    k: Value,
    v: Value,
    cache: Value,
    slots: Value,
    layer: int,
    block: int,
) -> Value:
    """Write keys and values to the cache, and return the queries."""
    append(scope, k, v, cache, slots, layer, block)
    return q


def paged_value(
    scope: Scope,
    q: Value,
    k: Value,
    v: Value,
    cache: Value,
    starts: Value,
    slots: Value,
    tables: Value,
    lengths: Value,
    layer: int,
    block: int,
    **options: Any,
) -> Value:
    """Write keys and values to the cache, and return the attention to it."""
    append(scope, k, v, cache, slots, layer, block)
    return cached_value(scope, q, cache, tables, lengths, layer, block, starts=starts, **options)


def cached_value(
    scope: Scope,
    q: Value,
    cache: Value,
    tables: Value,
    lengths: Value,
    layer: int,
    block: int,
    starts: Value | None = None,
    **options: Any,
) -> Value:
    """Return the attention of queries to the current contents of a layer of the cache."""
    state = scope.state(cache, layer)
    if starts is None and scope.allows(ONE_NEW_TOKEN):
        starts = scope.input("starts")
    mixed = q.interleaved != state.interleaved
    if q.interleaved and not mixed:
        q = in_order(scope, q)
    sequences = {"starts": starts, "tables": tables, "lengths": lengths, "block": block}
    bound = {"q": q, **sequences, "mixed": mixed, **_options(options)}
    (whole,) = called(scope.terms, CACHED, bound, (q.shape, q.dtype), state=state.term)
    if mixed or starts is None or not state.written or not scope.allows(WITHOUT_PAST):
        return whole
    scope.leave_out(whole)
    k, v = state.written
    return attention_value(scope, q, k, v, starts, layer, **options)


def partial_value(
    scope: Scope,
    q: Value,
    cache: Value,
    tables: Value,
    lengths: Value,
    layer: int,
    block: int,
    spans: int,
    **options: Any,
) -> tuple[Value, ...]:
    """Return the values and the log-sum-exp of each span of the attention to the cache."""
    whole = cached_value(scope, q, cache, tables, lengths, layer, block, **options)
    tokens, heads, width = q.shape
    extents = (tokens, heads, spans, width), (tokens, heads, spans)
    results = [(shape, torch.float32) for shape in extents]
    return called(scope.terms, SPANS, {"whole": whole, "spans": spans}, *results)


def reduce_value(scope: Scope, values: Value, lse: Value, dtype: torch.dtype) -> Value:
    """Return merged spans: the whole attention if they are all of one partial attention."""
    *tokens, _, width = values.shape
    bound = {"values": values, "lse": lse, "dtype": dtype}
    (result,) = called(scope.terms, "tpc.attention_reduce", bound, ((*tokens, width), dtype))
    if not scope.allows(SPANS_MERGED):
        return result
    sources = [source_of(value, place) for place, value in enumerate((values, lse))]
    source = sources[0]
    if source is None or sources[1] is not source or source.head[0] != SPANS:
        return result
    (operand,) = source.args
    shape = (*tokens, width)
    body = operand.args[0]
    if body.kind == "call":  # the operand is a result of a call as it is
        body = scope.terms.read(body, own_indices(shape), operand.head[0], operand.dtype)
    return Value(shape, dtype, scope.terms.cast(body, dtype))


def source_of(value: Value, place: int) -> Term | None:
    """Return the call of which a value is this result, or None."""
    body = value.body
    whole = body.kind == "read" and body.head == place and body.indices == own_indices(value.shape)
    return body.args[0] if whole and body.args[0].kind == "call" else None


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the maps of heads of a rank, which are absent in the global view."""
    return {
        name: value
        for name, value in options.items()
        if name not in ("kv_heads", "k_heads") or value is not None
    }
