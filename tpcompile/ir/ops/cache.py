"""Types and checks of the KV cache, shared by the ops that write or read it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompile.ir.kv import KV_FORMATS
from tpcompile.ir.ops.spec import require
from tpcompile.ir.roles import CacheOf
from tpcompile.ir.types import REPLICATE, Dim, Shard, ValueType

HEADS = 3
"""The dimension of `cache[layers, 2, slots, kv_heads, width]` that may be sharded."""


def kept_type(cache: ValueType, tokens: Dim) -> ValueType:
    """Return the type of the keys, or of the values, of `tokens` tokens in the cache."""
    kind = ValueType((tokens, *cache.shape[HEADS:]), cache.dtype)
    layout = cache.layout_of(HEADS)
    return kind if layout is None else kind.sharded(1, layout)


def stored_type(cache: ValueType, tokens: Dim) -> ValueType:
    """Return the same type in the format of the cache, for costs in bytes."""
    return replace(kept_type(cache, tokens), format=cache.format)


def check_cache(cache: ValueType, layer: int, block: int) -> None:
    """Refuse a value that is not a KV cache with this layer, replicated or sharded by head."""
    shape = cache.dims == HEADS + 2 and cache.shape[1] == 2
    require(shape, "kv-cache", cache, "[layers, 2, slots, kv_heads, width]")
    by_head = isinstance(cache.placement, Shard) and cache.layout_of(HEADS) is not None
    require(
        by_head or cache.placement == REPLICATE,
        "kv-cache",
        cache,
        "a cache sharded by head or replicated",
    )
    require(
        cache.format in (None, *KV_FORMATS.values()),
        "kv-cache",
        cache,
        f"rows of {cache.dtype}, or {', '.join(map(str, KV_FORMATS.values()))}",
    )
    layers = cache.extent(0)
    require(0 <= layer < layers, "kv-cache", f"layer {layer}", f"one of {layers} layers")
    require(block > 0, "kv-cache", f"block={block}", "a block of one token or more")


def check_blocks(cache: ValueType, block: int) -> None:
    """Refuse an op whose block size differs from the block size of the cache."""
    require(
        cache.role == CacheOf(block),
        "kv-cache",
        f"cache {cache}, block={block}",
        f"{CacheOf(block)}, since all layers use the same block size",
    )


def check_append(
    k: ValueType, v: ValueType, cache: ValueType, slots: ValueType, layer: int, block: int
) -> None:
    """Refuse a cache that cannot store the keys and values of all KV heads, each once."""
    keys = k.in_role(None)
    require(keys == v, "kv-alike", f"k {k}, v {v}", "keys and values of the same type and layout")
    require(
        cache.dims == HEADS + 2
        and cache.shape[1] == 2
        and (cache.dtype, cache.shape[HEADS:]) == (k.dtype, k.shape[1:]),
        "kv-cache",
        cache,
        f"{k.dtype}[layers, 2, slots, {k.shape[1]}, {k.shape[2]}], to match the keys",
    )
    require(
        keys == kept_type(cache, k.shape[0]),
        "kv-cache",
        f"cache {cache}, k {k}",
        "a cache with the same layout as the keys",
    )
    check_cache(cache, layer, block)
    check_blocks(cache, block)
    known = slots.placement == REPLICATE and slots.dtype == torch.long
    require(
        known and slots.shape == k.shape[:1],
        "kv-cache",
        f"slots {slots}, k {k}",
        "one slot per new token, as i64 on every rank",
    )


def check_places(tables: ValueType, lengths: ValueType) -> None:
    """Refuse tables or lengths of the wrong dtype, placement or shape."""
    for kind in (tables, lengths):
        known = kind.placement == REPLICATE and kind.dtype == torch.long
        require(known, "kv-cache", kind, "tables and lengths as i64 on every rank")
    require(
        tables.dims == 2 and lengths.shape == tables.shape[:1],
        "kv-cache",
        f"tables {tables}, lengths {lengths}",
        "tables[N, B] and lengths[N], one row per sequence",
    )


def check_one_each(q: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse a step in which a sequence does not have exactly one new token."""
    if not len(q) == len(tables) == len(lengths):
        raise ValueError(
            "a decode graph requires one new token of each sequence, got "
            f"{len(q)} new tokens for {len(lengths)} sequences with {len(tables)} tables"
        )
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(
            f"each sequence must have a length of at least 1, got {int(lengths.min())}"
        )
