"""Operations on many tokens in bf16 other than products, by kernels of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch

from tpcompile.backends.native.build import library
from tpcompile.backends.native.many import (
    ADDRESS,
    GRAIN,
    NUMBER,
    REAL,
    Heads,
    Operation,
    fields_of,
    run,
    structure,
    takes,
)
from tpcompile.ir.kv import is_rounded
from tpcompile.ir.ops.paged_attention import first_seen, held_blocks

_PART, _MOST_PART = 32, 96
"""The shortest and longest part of a sequence in attention. Each part packs all keys that it
reads."""
_ITEMS = 8
"""The minimum number of items of attention per thread, if parts are longer than the shortest."""
_WIDTH = 32
"""The width of heads in attention is a multiple of this."""


def takes_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return whether attention takes these queries, keys and values, and this cache."""
    whole = is_rounded(cache) and cache.device.type == "cpu" and cache.stride(-1) == 1
    return takes(q, k, v) and (whole or takes(cache)) and q.shape[-1] % _WIDTH == 0


_NormOf = structure(
    ("x", Heads), *fields_of(ADDRESS, "weight", "out"),
    *fields_of(NUMBER, "heads", "width", "zero_centered"), ("eps", REAL),
)  # fmt: skip
_AddNormOf = structure(
    *fields_of(ADDRESS, "x", "residual"), ("residual_in_fp32", NUMBER),
    *fields_of(ADDRESS, "weight", "normed", "total"), *fields_of(NUMBER, "width", "zero_centered"),
    ("eps", REAL),
)  # fmt: skip
_SwigluOf = structure(*fields_of(Heads, "gate", "up"), ("out", ADDRESS), ("width", NUMBER))
_GateOf = structure(
    *fields_of(Heads, "x", "gate"), ("out", ADDRESS), *fields_of(NUMBER, "heads", "width")
)
_GatedNormOf = structure(
    *fields_of(Heads, "x", "gate"), *fields_of(ADDRESS, "weight", "out"),
    *fields_of(NUMBER, "heads", "width"), ("eps", REAL),
)  # fmt: skip
_RopeOf = structure(
    ("x", Heads),
    *fields_of(ADDRESS, "cos", "sin", "out"),
    *fields_of(NUMBER, "heads", "width", "rotated"),
)
_AppendOf = structure(
    *fields_of(Heads, "keys", "values", "cached_keys", "cached_values"), ("slots", ADDRESS),
    *fields_of(NUMBER, "heads", "width", "rounds"),
)  # fmt: skip
_AttentionOf = structure(
    *fields_of(Heads, "q", "keys", "values"), ("out", ADDRESS),
    *fields_of(NUMBER, "heads", "width"), *fields_of(ADDRESS, "starts", "lengths", "tables"),
    *fields_of(NUMBER, "sequences", "columns", "table_stride", "slots", "block", "part_tokens"),
    ("runs", ADDRESS), *fields_of(NUMBER, "run_count", "window", "rounds"), ("scale", REAL),
)  # fmt: skip


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """Compute `rms_norm` of `x[tokens, width]` or `x[tokens, heads, width]`."""
    out, heads, width = _result(x)
    arguments = _NormOf(
        Heads.of(x), weight.data_ptr(), out.data_ptr(), heads, width, zero_centered, eps
    )
    run(Operation.NORM, arguments, len(x), heads * width)
    return out


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `gated_rms_norm` of `x[tokens, heads, width]` and a gate of this shape."""
    out, heads, width = _result(x)
    arguments = _GatedNormOf(
        *map(Heads.of, (x, gate)), weight.data_ptr(), out.data_ptr(), heads, width, eps
    )
    run(Operation.GATED_NORM, arguments, len(x), heads * width)
    return out


def _result(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return memory for the result, the heads, and their width."""
    return torch.empty(x.shape, dtype=x.dtype), (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` of contiguous `x[tokens, width]` and a residual in bf16 or fp32."""
    normed, total = torch.empty_like(x), torch.empty_like(x)
    arguments = _AddNormOf(
        *(x.data_ptr(), residual.data_ptr(), residual.dtype == torch.float32),
        *(weight.data_ptr(), normed.data_ptr(), total.data_ptr(), x.shape[-1]),
        *(zero_centered, eps),
    )
    run(Operation.ADD_NORM, arguments, len(x), x.shape[-1])
    return normed, total


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `swiglu` of `gate[tokens, width]` and `up[tokens, width]`."""
    out, _, width = _result(gate)
    arguments = _SwigluOf(Heads.of(gate), Heads.of(up), out.data_ptr(), width)
    run(Operation.SWIGLU, arguments, len(gate), width)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute `sigmoid_gate` of tokens or heads of tokens."""
    out, heads, width = _result(x)
    arguments = _GateOf(Heads.of(x), Heads.of(gate), out.data_ptr(), heads, width)
    run(Operation.GATE, arguments, len(x), heads * width)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute `rope` of `x[tokens, heads, width]` with contiguous tables."""
    out, heads, width = _result(x)
    arguments = _RopeOf(
        *(Heads.of(x), cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
        *(heads, width, cos.shape[-1]),
    )
    run(Operation.ROPE, arguments, len(x), heads * width)
    return out


def append(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values of tokens to their slots of one layer's `cache[2, slots, …]`."""
    capacity = cache.shape[1]
    written = (
        ctypes.c_void_p(slots.data_ptr()),
        ctypes.c_int64(len(slots)),
        ctypes.c_int64(capacity),
    )
    if not library().tpc_writes_cache(*written):
        raise ValueError(f"slots must be in the cache of {capacity}, got {slots.tolist()}")
    sides = map(Heads.of, (k, v, *cache))
    arguments = _AppendOf(*sides, slots.data_ptr(), *k.shape[1:], is_rounded(cache))
    run(Operation.APPEND, arguments, len(k), k[0].numel())


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    starts: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    block: int,
    runs: Sequence[tuple[int, int, int]],
) -> torch.Tensor:
    """Compute the attention of new tokens to one layer's `cache[2, slots, KV heads, width]`.

    Each of `runs` has a KV head, and the first and last of the query heads that read it.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    read = torch.tensor([(head, first, last + 1 - first) for head, first, last in runs])
    length = int(lengths.sum()) // len(lengths)
    part = _part_tokens(len(q) * len(runs), min(length, window or length))
    arguments = _AttentionOf(
        *(*map(Heads.of, (q, *cache)), out.data_ptr(), *q.shape[1:]),
        *(starts.data_ptr(), lengths.data_ptr(), tables.data_ptr()),
        *(*tables.shape, tables.stride(0), cache.shape[1], block, part),
        *(read.data_ptr(), len(read), window or 0, is_rounded(cache), scale),
    )
    if not library().tpc_reads_cache(ctypes.byref(arguments)):
        raise _outside(cache.shape[1], starts, tables, lengths, window, block)
    parts = sum(-(-(stop - start) // part) for start, stop in pairwise(starts.tolist()))
    run(Operation.ATTENTION, arguments, parts * len(read), GRAIN)
    return out


def _part_tokens(heads: int, keys: int) -> int:
    """Return the tokens of a part, if tokens times KV heads are `heads` and a token sees `keys`.

    A long part packs keys less often, but multiplies more keys that are masked out.
    """
    most = min(heads // (_ITEMS * torch.get_num_threads()), keys // _PART)
    return min(_MOST_PART, max(_PART, most // _PART * _PART))


def _outside(
    slots: int,
    starts: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    window: int | None,
    block: int,
) -> ValueError:
    """Return the error for tables that point outside the cache."""
    sequences = zip(pairwise(starts.tolist()), lengths.tolist(), tables, strict=True)
    try:
        for (start, stop), length, table in sequences:
            first = first_seen(stop - start, length, window)
            if stop > start:
                held_blocks(table, first, length, block, slots)
    except ValueError as error:
        return error
    return ValueError(f"the tokens of sequences must be in order, got starts {starts.tolist()}")
