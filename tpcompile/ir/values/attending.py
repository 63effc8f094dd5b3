"""Expressions of attention: to keys and values, and to a cache that the step has written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpcompile.ir.values.build import called, without_batch
from tpcompile.ir.values.index import divided, plus, times
from tpcompile.ir.values.scope import Kept, Scope
from tpcompile.ir.values.term import Term
from tpcompile.ir.values.value import Value, coordinates, extent_of, viewed

ATTENTION = "tpc.attention"
STORED = "stored keys and values"
CACHED = "attention to a cache"


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
) -> Kept:
    """Return the state of a layer of the cache with the keys and values of the step."""
    before = scope.state(cache, layer)
    terms = scope.terms
    keys = in_order(scope, k) if k.interleaved else k
    operands = [terms.whole(value.shape, value.body) for value in (keys, v, slots)]
    head = (STORED, layer, block)
    state = Kept(terms.call(head, [*operands, before.term]), k.interleaved)
    scope.write(cache, layer, state)
    return state


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
    """Return the attention of queries to a layer of the cache, as it is at this place."""
    state, q, bound = _read(scope, q, cache, tables, lengths, layer, block, starts, options)
    (result,) = _called(scope, CACHED, bound, state, (q.shape, q.dtype))
    return result


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
    """Return the values and the log-sum-exp of each span."""
    given = {**options, "spans": spans}
    state, q, bound = _read(scope, q, cache, tables, lengths, layer, block, None, given)
    tokens, heads, width = q.shape
    results = (
        ((tokens, heads, spans, width), torch.float32),
        ((tokens, heads, spans), torch.float32),
    )
    return _called(scope, "spans of attention to a cache", bound, state, *results)


def reduce_value(scope: Scope, values: Value, lse: Value, dtype: Any) -> Value:
    *tokens, _, width = values.shape
    bound = {"values": values, "lse": lse, "dtype": dtype}
    (result,) = called(scope.terms, "tpc.attention_reduce", bound, ((*tokens, width), dtype))
    return result


def _read(
    scope: Scope,
    q: Value,
    cache: Value,
    tables: Value,
    lengths: Value,
    layer: int,
    block: int,
    starts: Value | None,
    options: dict[str, Any],
) -> tuple[Term, Value, dict[str, Any]]:
    state = scope.state(cache, layer)
    bound = {"tables": tables, "lengths": lengths, "block": block, **_options(options)}
    if q.interleaved and state.interleaved:
        q = in_order(scope, q)
    elif q.interleaved or state.interleaved:
        bound["order"] = "of queries" if q.interleaved else "of keys"
    if starts is not None:
        bound["starts"] = starts
    return state.term, q, {"q": q, **bound}


def _called(
    scope: Scope, name: str, bound: dict[str, Any], state: Term, *results: Any
) -> tuple[Value, ...]:
    return called(scope.terms, name, bound, *results, state=state)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the maps of heads of a rank, which are absent in the global view."""
    return {
        name: value
        for name, value in options.items()
        if name not in ("kv_heads", "k_heads") or value is not None
    }
