"""Attention over a paged KV cache; tables list the blocks of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tpcompile.ir.kv import is_rounded, loaded_rows, stored_rows
from tpcompile.ir.ops.attention import attend, attention_cost, attention_localize, attention_rule
from tpcompile.ir.ops.cache import check_append, check_places, stored_type
from tpcompile.ir.ops.spec import Cost, define, require
from tpcompile.ir.types import ValueType
from tpcompile.ir.values.attending import paged_value


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    layer: int,
    block: int,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute the `attention` of new tokens to themselves and to the tokens in the cache.

    The keys and values of token `t` are first stored in slot `slots[t]`. Sequence `i` then has
    `lengths[i]` tokens, the new ones last, and is stored in the blocks `tables[i]`, where block
    `b` consists of `block` slots from slot `b * block`. Blocks not in the tables are never read.

    If the cache rounds its rows, new tokens too attend to the rounded keys and values. So a result
    depends neither on the other tokens of the step, nor on the step that stored a token.
    """
    keys, values = append_rows(k, v, cache, slots, layer)
    out = torch.empty_like(q)
    sequences = zip(pairwise(starts.tolist()), lengths.tolist(), tables, strict=True)
    for (start, stop), length, table in sequences:
        new, rows = stop - start, slice(start, stop)
        first = first_seen(new, length, window)
        if not new:
            continue
        if length == new and not is_rounded(cache):  # the cache need not be read
            out[rows] = attend(q[rows], k[rows], v[rows], scale, window, kv_heads)
        else:
            seen_k, seen_v = (
                read_tokens(side, table, first, length, block) for side in (keys, values)
            )
            out[rows] = attend_rows(q[rows], seen_k, seen_v, scale, window, kv_heads)
    return out


def append_rows(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layer: int
) -> torch.Tensor:
    """Store keys and values in slots of a layer of the cache; return the layer."""
    sides = cache[layer]
    for side, new in zip(sides, (k, v), strict=True):
        side.index_copy_(0, slots, stored_rows(new, side))
    return sides


def attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    kv_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute `attend` for rows of the cache; in fp32 if these are rounded."""
    if not is_rounded(keys):
        return attend(q, keys, values, scale, window, kv_heads)
    k, v = loaded_rows(keys), loaded_rows(values)
    return attend(q.float(), k, v, scale, window, kv_heads).to(q.dtype)


def first_seen(new: int, length: int, window: int | None) -> int:
    """Return the first token that any of the last `new` tokens of a sequence sees."""
    if length < new:
        raise ValueError(f"a sequence must contain its {new} new tokens, got a length of {length}")
    return 0 if window is None else max(0, length - new + 1 - window)


def read_tokens(
    side: torch.Tensor, table: torch.Tensor, first: int, length: int, block: int
) -> torch.Tensor:
    """Return tokens `first` to `length` of a sequence, as a view if its blocks are consecutive."""
    if first == length:
        return side[:0]
    held = held_blocks(table, first, length, block, len(side))
    skipped = first % block
    wanted = length - first
    numbers = held.tolist()
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        start = numbers[0] * block + skipped
        return side[start : start + wanted]
    blocks = side.view(-1, block, *side.shape[1:]).index_select(0, held.to(side.device))
    return blocks.flatten(0, 1)[skipped : skipped + wanted]


def held_blocks(
    table: torch.Tensor, first: int, length: int, block: int, slots: int
) -> torch.Tensor:
    """Return the blocks with tokens `first` to `length`, all of them in a cache of `slots` slots.

    Slicing would not fail: it clips blocks beyond the end, and counts negative ones from the end.
    """
    held = table[first // block : -(-length // block)]
    enough = (first // block + len(held)) * block >= length
    if not enough or not 0 <= int(held.min()) <= int(held.max()) < slots // block:
        raise ValueError(
            f"a sequence's blocks must contain tokens {first} to {length} and be in the cache, "
            f"got blocks {held.tolist()} of {block} tokens in a cache of {slots} slots"
        )
    return held


def _rule(
    q: ValueType,
    k: ValueType,
    v: ValueType,
    cache: ValueType,
    slots: ValueType,
    tables: ValueType,
    lengths: ValueType,
    layer: int,
    block: int,
    **others: Any,
) -> ValueType:
    result = attention_rule(q, k, v, layer=layer, **others)
    require(q.dims == 3, "attention", q, "q[T, heads, width]")
    check_append(k, v, cache, slots, layer, block)
    check_places(tables, lengths)
    return result


def _cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    q, _, _, cache, *_ = operands
    stored = stored_type(cache, q.shape[0])
    return attention_cost(result, [q, stored, stored], rank)


PAGED_ATTENTION = define(
    paged_attention,
    fake=lambda q, *_, **__: torch.empty_like(q),
    overwrites=("cache",),
    rule=_rule,
    cost=_cost,
    localize=attention_localize,
    takes_roles=True,
    in_formats=("cache",),
    value=paged_value,
)
