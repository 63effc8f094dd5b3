"""Operations on many tokens in bf16, by kernels of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tpcompile.backends.native.build import library
from tpcompile.backends.native.many import (
    ADDRESS,
    GRAIN,
    NUMBER,
    PATHS,
    REAL,
    Heads,
    Operation,
    chosen_path,
    each,
    run,
    structure,
    takes,
)
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import HIGH, SCALE, SUPER_SCALE, Format
from tpcompile.ir.kv import is_rounded
from tpcompile.ir.layout import Interval
from tpcompile.ir.ops.few_bits import RoundingWeight, decoded
from tpcompile.ir.ops.paged_attention import first_seen, held_blocks
from tpcompile.vm.program.abi import PARTS

_PART, _MOST_PART = 32, 96
"""The shortest and longest part of a sequence in attention. Each part packs all keys that it
reads."""
_ITEMS = 8
"""The minimum number of items of attention per thread, if parts are longer than the shortest."""
_TOKENS = 128
"""The tokens of an item of a product: whole panels, few enough to keep all threads busy."""
_MANY_TOKENS = 512
"""The same for weights of few bits, whose rows each item decodes."""
_LANES = 16
"""The columns that kernels decode at a time."""
_COLUMNS = 32
"""Attention takes heads, and products take tokens, whose width is a multiple of this."""
PACKED, _ROWS = 64, 48
"""The tokens that an item packs, and the rows of a weight in an item: `kItem` and `kItemRows` of
prompts_products.h."""
_WORDS = 64
"""The columns of rounded tokens that are packed together."""


def takes_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return whether attention takes these queries, keys and values, and this cache."""
    whole = is_rounded(cache) and cache.device.type == "cpu" and cache.stride(-1) == 1
    return takes(q, k, v) and (whole or takes(cache)) and q.shape[-1] % _COLUMNS == 0


def _multiplies() -> bool:
    """Return whether products are faster than torch's, which use AMX where the CPU has it."""
    return chosen_path() != "amx_bf16"


def takes_product(
    x: torch.Tensor, weight: torch.Tensor | FewBits, bias: torch.Tensor | None
) -> bool:
    """Return whether the kernels take this linear."""
    takes_all = takes(x) and (bias is None or (takes(bias) and bias.is_contiguous()))
    if not takes_all or x.dim() != 2 or x.shape[1] % _COLUMNS:
        return False
    if isinstance(weight, FewBits):
        stored = weight.format
        if stored.columns % _LANES:
            return False
        if stored.rounds and stored.columns % stored.block:
            return False
        return all(part.is_contiguous() for part in weight.parts)
    return takes(weight) and weight.is_contiguous() and _multiplies()


_NormOf = structure(
    ("x", Heads), *each(ADDRESS, "weight", "out"),
    *each(NUMBER, "heads", "width", "zero_centered"), ("eps", REAL),
)  # fmt: skip
_AddNormOf = structure(
    *each(ADDRESS, "x", "residual"), ("residual_in_fp32", NUMBER),
    *each(ADDRESS, "weight", "normed", "total"), *each(NUMBER, "width", "zero_centered"),
    ("eps", REAL),
)  # fmt: skip
_SwigluOf = structure(*each(Heads, "gate", "up"), ("out", ADDRESS), ("width", NUMBER))
_GateOf = structure(*each(Heads, "x", "gate"), ("out", ADDRESS), *each(NUMBER, "heads", "width"))
_GatedNormOf = structure(
    *each(Heads, "x", "gate"), *each(ADDRESS, "weight", "out"), *each(NUMBER, "heads", "width"),
    ("eps", REAL),
)  # fmt: skip
_RopeOf = structure(
    ("x", Heads), *each(ADDRESS, "cos", "sin", "out"), *each(NUMBER, "heads", "width", "rotated")
)
_AppendOf = structure(
    *each(Heads, "keys", "values", "cached_keys", "cached_values"), ("slots", ADDRESS),
    *each(NUMBER, "heads", "width", "rounds"),
)  # fmt: skip
_AttentionOf = structure(
    *each(Heads, "q", "keys", "values"), ("out", ADDRESS), *each(NUMBER, "heads", "width"),
    *each(ADDRESS, "starts", "lengths", "tables"),
    *each(NUMBER, "sequences", "columns", "table_stride", "slots", "block", "part_tokens"),
    ("runs", ADDRESS), *each(NUMBER, "run_count", "window", "rounds"), ("scale", REAL),
)  # fmt: skip
_OF_ROWS = ("format", "row_bytes", "high_bytes", "groups", "supers", "first")
"""The fields of a weight in few bits: its format, and the layout of its rows."""
LinearOf = structure(
    ("x", Heads), *each(ADDRESS, "weight", *PARTS),
    *each(NUMBER, *_OF_ROWS),
    *each(ADDRESS, "bias", "out", "packed", "factors", "sums"),
    *each(NUMBER, "tokens", "columns", "rows", "part_tokens", "threads"),
)  # fmt: skip


class FewBits(NamedTuple):
    """A weight of several components, of which kernels decode some rows at a time."""

    format: Format
    parts: Sequence[torch.Tensor]
    columns: Interval
    """Its columns, among those of the whole weight."""

    @property
    def by_suffix(self) -> Mapping[str, torch.Tensor]:
        """The components, by suffix."""
        names = (one.suffix for one in self.format.components)
        return dict(zip(names, self.parts, strict=True))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of `_OF_ROWS`. Parts are rows without gaps."""
        widths = {suffix: part.shape[1] for suffix, part in self.by_suffix.items()}
        values = self.format.values
        return (
            int(self.format),
            widths[values.suffix] * values.dtype.itemsize,
            widths.get(HIGH, 0) * DType.I32.itemsize,
            widths[SCALE],
            widths.get(SUPER_SCALE, 0),
            self.columns[0],
        )

    def decoded(self, dtype: torch.dtype) -> torch.Tensor | RoundingWeight:
        """Return the whole weight as torch multiplies it."""
        return decoded(str(self.format), self.parts, self.columns, dtype)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """Compute `rms_norm` of `x[tokens, width]` or `x[tokens, heads, width]`."""
    out, heads, width = _result(x)
    own = _NormOf(Heads.of(x), weight.data_ptr(), out.data_ptr(), heads, width, zero_centered, eps)
    run(Operation.NORM, own, len(x), heads * width)
    return out


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `gated_rms_norm` of `x[tokens, heads, width]` and a gate of this shape."""
    out, heads, width = _result(x)
    own = _GatedNormOf(
        *map(Heads.of, (x, gate)), weight.data_ptr(), out.data_ptr(), heads, width, eps
    )
    run(Operation.GATED_NORM, own, len(x), heads * width)
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
    own = _AddNormOf(
        *(x.data_ptr(), residual.data_ptr(), residual.dtype == torch.float32),
        *(weight.data_ptr(), normed.data_ptr(), total.data_ptr(), x.shape[-1]),
        *(zero_centered, eps),
    )
    run(Operation.ADD_NORM, own, len(x), x.shape[-1])
    return normed, total


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `swiglu` of `gate[tokens, width]` and `up[tokens, width]`."""
    out, _, width = _result(gate)
    own = _SwigluOf(Heads.of(gate), Heads.of(up), out.data_ptr(), width)
    run(Operation.SWIGLU, own, len(gate), width)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute `sigmoid_gate` of tokens or heads of tokens."""
    out, heads, width = _result(x)
    own = _GateOf(Heads.of(x), Heads.of(gate), out.data_ptr(), heads, width)
    run(Operation.GATE, own, len(x), heads * width)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute `rope` of `x[tokens, heads, width]` with contiguous tables."""
    out, heads, width = _result(x)
    own = _RopeOf(
        *(Heads.of(x), cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
        *(heads, width, cos.shape[-1]),
    )
    run(Operation.ROPE, own, len(x), heads * width)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor | FewBits, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the product of `x[tokens, columns]` and `weight[rows, columns]`.

    The values of a weight of few bits are rounded to bf16, unless its format rounds the tokens.
    """
    product = Product.of(x, weight, -(-len(x) // PACKED) * PACKED)
    own = product.arguments(bias)
    run(product.pack, own, -(-len(x) // PACKED), PACKED * x.shape[1])
    run(product.multiply, own, product.items(len(x)), product.item_values)
    return product.memory["out"]


@dataclass(frozen=True)
class Product:
    """A product of `x[tokens, columns]` and `weight[rows, columns]`, and its memory."""

    x: torch.Tensor
    weight: torch.Tensor | FewBits
    memory: Mapping[str, torch.Tensor]
    """The memory per token of `Linear` of prompts.h, by name: results, and packed tokens."""

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor | FewBits, packed: int) -> Product:
        """Allocate memory with room for this number of packed tokens."""
        rows = len(weight.parts[0] if isinstance(weight, FewBits) else weight)
        names = ("packed", "factors", "sums")
        memory = dict(zip(names, _packed(packed, x.shape[1], weight), strict=False))
        return cls(x, weight, {"x": x, "out": x.new_empty(len(x), rows), **memory})

    @property
    def rounds(self) -> bool:
        """Whether tokens are rounded to int8."""
        return "sums" in self.memory

    @property
    def part_tokens(self) -> int:
        """The tokens of an item."""
        return _MANY_TOKENS if isinstance(self.weight, FewBits) else _TOKENS

    def items(self, tokens: Any) -> Any:
        """Return the number of items of these tokens."""
        return -(-self.memory["out"].shape[1] // _ROWS) * -(-tokens // self.part_tokens)

    @property
    def item_values(self) -> int:
        """The products of an item."""
        return _ROWS * self.part_tokens * self.x.shape[1]

    @property
    def pack(self) -> Operation:
        return Operation.PACK_ROUNDED if self.rounds else Operation.PACK

    @property
    def multiply(self) -> Operation:
        return Operation.LINEAR_ROUNDED if self.rounds else Operation.LINEAR

    def arguments(self, bias: torch.Tensor | None = None) -> ctypes.Structure:
        """Return the arguments of both operations for all tokens."""
        parts = parts_of(self.weight)
        address = {name: one.data_ptr() for name, one in {**parts, **self.memory}.items()}
        others = [address.get(name) for name in PARTS]
        (tokens, columns), rows = self.x.shape, self.memory["out"].shape[1]
        return LinearOf(
            *(Heads.of(self.x), address["weight"], *others),
            *(self.weight.numbers if isinstance(self.weight, FewBits) else (0,) * len(_OF_ROWS)),
            *(None if bias is None else bias.data_ptr(), address["out"], address["packed"]),
            *(address.get("factors"), address.get("sums")),
            *(tokens, columns, rows, self.part_tokens, torch.get_num_threads()),
        )


def parts_of(weight: torch.Tensor | FewBits) -> dict[str, torch.Tensor]:
    """Return the components of a weight, by their names in `Linear` of prompts.h."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight}
    parts = weight.by_suffix
    others = {name: parts[suffix] for name, suffix in PARTS.items() if suffix in parts}
    return {"weight": parts[weight.format.values.suffix], **others}


def _packed(tokens: int, columns: int, weight: torch.Tensor | FewBits) -> list[torch.Tensor]:
    """Return memory for packed tokens, and for the factors and sums of rounded ones."""
    if not isinstance(weight, FewBits) or not weight.format.rounds:
        return [torch.empty(tokens, columns, dtype=PATHS[chosen_path()])]
    first, last = weight.columns
    blocks = -(-last // weight.format.block) - first // weight.format.block
    return [
        torch.empty(tokens, -(-columns // _WORDS) * _WORDS, dtype=torch.int8),
        torch.empty(tokens, blocks),
        torch.empty(tokens, blocks, dtype=torch.int32),
    ]


def append(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values of tokens to their slots of one layer's `cache[2, slots, …]`."""
    held = cache.shape[1]
    written = ctypes.c_void_p(slots.data_ptr()), ctypes.c_int64(len(slots)), ctypes.c_int64(held)
    if not library().tpc_writes_cache(*written):
        raise ValueError(f"slots must be in the cache of {held}, got {slots.tolist()}")
    sides = map(Heads.of, (k, v, *cache))
    own = _AppendOf(*sides, slots.data_ptr(), *k.shape[1:], is_rounded(cache))
    run(Operation.APPEND, own, len(k), k[0].numel())


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
    own = _AttentionOf(
        *(*map(Heads.of, (q, *cache)), out.data_ptr(), *q.shape[1:]),
        *(starts.data_ptr(), lengths.data_ptr(), tables.data_ptr()),
        *(*tables.shape, tables.stride(0), cache.shape[1], block, part),
        *(read.data_ptr(), len(read), window or 0, is_rounded(cache), scale),
    )
    if not library().tpc_reads_cache(ctypes.byref(own)):
        raise _outside(cache.shape[1], starts, tables, lengths, window, block)
    parts = sum(-(-(stop - start) // part) for start, stop in pairwise(starts.tolist()))
    run(Operation.ATTENTION, own, parts * len(read), GRAIN)
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
