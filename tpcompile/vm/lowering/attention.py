"""The first half of a layer: queries, keys and values, and attention in spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops.paged_attention import HEADS
from tpcompile.vm.groups import (
    AttentionReduce,
    NormQkvRopeAppend,
    NormQkvRows,
    PartialAttention,
)
from tpcompile.vm.groups.attention import AttentionOperands, ReduceOperands
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.groups.qkv import Part, QkvOperands
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.program.instruction import NONE, Range, fraction


def normed(to: Building, node: fx.Node, rank: int) -> Normed:
    """The normed residual that a fused op begins with."""
    bound = to.bound(node)
    x, weight = to.where(bound["x"], rank), to.where(bound["norm"], rank)
    return Normed(x, weight, to.plan.batch, width_of(bound["x"]), fraction(bound["eps"]))


def cache_of(to: Building, node: fx.Node, block: int) -> int:
    """The cache: in regions by sequence and by past or new, in memory by slot."""
    kind = value_type(node)
    to.plan.check_room(block)
    slots = to.plan.batch * to.plan.most_blocks(block) * block
    regions, storages = [], []
    for rank in range(to.ranks):
        layers, _, _, heads, width = kind.local_shape(rank)
        assert isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)
        regions.append((layers, 2, to.plan.batch, heads, 2))
        storages.append((layers, 2, slots, heads, width))
    return to.declare("cache", regions, kind.dtype, "cache", storages)


def places(to: Building, block: int, rank: int) -> dict[str, int]:
    """Where sequences lie."""
    batch, most = to.plan.batch, to.plan.most_blocks(block)
    return {
        "lengths": to.alike("lengths", (batch,), torch.int32, "state") + rank,
        "tables": to.alike("tables", (batch, most), torch.int32, "input") + rank,
        "most_blocks": most,
        "block": block,
    }


def norm_qkv(to: Building, node: fx.Node) -> None:
    """Queries, then keys, then values, of each rank."""
    q = to.declare(
        "q", [(to.plan.batch, width) for width in to.local_columns(node)], value_type(node).dtype
    )
    to.put(node, q)
    cache = cache_of(to, to.bound(node)["cache"], to.bound(node)["block"])
    for rank in range(to.ranks):
        counts = to.bound(node, rank)["heads"]
        first = 0
        for part, heads in zip((Part.Q, Part.K, Part.V), counts, strict=True):
            out = q if part == Part.Q else cache
            at = _qkv_operands(to, node, rank, part, first, out + rank)
            to.instructions += _heads(to, at, heads, sum(counts))
            first += heads * at.width


def _qkv_operands(
    to: Building, node: fx.Node, rank: int, part: Part, first_row: int, out: int
) -> QkvOperands:
    bound = to.bound(node)
    width = width_of(bound["cos"])
    head_norm = {Part.Q: bound["q_norm"], Part.K: bound["k_norm"], Part.V: None}[part]
    longest, dtype = to.plan.max_seq_len, value_type(bound["cos"]).dtype
    return QkvOperands(
        rank=rank,
        layer=bound["layer"],
        part=part,
        normed=normed(to, node, rank),
        weight=to.where(bound["weight"], rank),
        bias=to.where_if(bound["bias"], rank),
        first_row=first_row,
        head_norm=to.where_if(head_norm, rank),
        head_eps=fraction(bound["head_eps"]),
        cos=to.alike("cos", (longest, width), dtype, "input") + rank,
        sin=to.alike("sin", (longest, width), dtype, "input") + rank,
        longest=longest,
        interleaved=bound["interleaved"],
        positions=to.alike("positions", (to.plan.batch,), torch.int32, "state") + rank,
        width=width,
        out=out,
        item=value_type(bound["weight"]).dtype.itemsize,
        **places(to, bound["block"], rank),
    )


def _heads(
    to: Building, at: QkvOperands, heads: int, of: int
) -> Iterator[NormQkvRopeAppend | NormQkvRows]:
    """The heads of one part, whole or in blocks of rows; `of` so many of all parts."""
    if not to.plan.splits_heads(of):
        yield from (NormQkvRopeAppend(at, run) for run in to.plan.head_runs(heads, of))
        return
    blocks = to.plan.row_blocks(at.width, of)
    wide = [(to.plan.batch, rows) for rows in _weight_rows(to, at)]
    raw = to.declare("raw_qkv", wide, to.buffers[at.normed.x].dtype) + at.rank
    counts = [(rows // at.width,) for _, rows in wide]
    arrivals = to.declare("arrivals", counts, torch.int32, "state") + at.rank
    for head in range(heads):
        for rows in blocks:
            yield NormQkvRows(at, raw, arrivals, head, rows, len(blocks))


def _weight_rows(to: Building, at: QkvOperands) -> list[int]:
    first = at.weight - at.rank
    return [to.buffers[first + rank].shape[0] for rank in range(to.ranks)]


def partial_attention(to: Building, node: fx.Node) -> None:
    """Every sequence, KV head and span, and the query heads that read it."""
    bound = to.bound(node)
    spans = bound["spans"]
    to.plan.check_spans(spans, bound["block"])
    queries = value_type(bound["q"])
    dims: list[Any] = [queries.local_shape(rank)[1:] for rank in range(to.ranks)]
    batch = to.plan.batch
    values = to.declare("partial_values", [(batch, h, spans, w) for h, w in dims], torch.float32)
    lse = to.declare("partial_lse", [(batch, h, spans) for h, _ in dims], torch.float32)
    to.put(node, values)
    for rank in range(to.ranks):
        at = _attention_operands(to, node, rank, values + rank, lse + rank, spans)
        for sequence in range(batch):
            for kv_head, heads in _readers(to, node, rank):
                for span in range(spans):
                    to.instructions.append(PartialAttention(at, sequence, kv_head, heads, span))


def _attention_operands(
    to: Building, node: fx.Node, rank: int, values: int, lse: int, spans: int
) -> AttentionOperands:
    bound = to.bound(node)
    block, context = bound["block"], min(to.plan.context, to.plan.max_seq_len)
    held = -(-context // block)
    return AttentionOperands(
        rank=rank,
        layer=bound["layer"],
        q=to.where(bound["q"], rank),
        cache=cache_of(to, bound["cache"], block) + rank,
        values=values,
        lse=lse,
        width=width_of(bound["q"]),
        scale=fraction(bound["scale"]),
        window=NONE if bound["window"] is None else bound["window"],
        spans=spans,
        planned=-(-held // spans) * block,
        item=value_type(bound["q"]).dtype.itemsize,
        **places(to, block, rank),
    )


def _readers(to: Building, node: fx.Node, rank: int) -> Iterator[tuple[int, Range]]:
    """Each KV head of the rank with a run of query heads that read it."""
    bound = to.bound(node, rank)
    heads = value_type(bound["q"]).local_shape(rank)[1]
    shared = value_type(bound["cache"]).local_shape(rank)[HEADS]
    assert isinstance(heads, int) and isinstance(shared, int)
    read: Sequence[int] = bound["kv_heads"] or [h // (heads // shared) for h in range(heads)]
    first = 0
    for kv_head, run in groupby(read):
        stop = first + len(list(run))
        yield kv_head, Range(first, stop)
        first = stop


def attention_reduce(to: Building, node: fx.Node) -> None:
    """The spans of each sequence: as many heads at once as keeps all workers busy."""
    bound = to.bound(node)
    columns = to.local_columns(node)
    width, dtype = width_of(node), value_type(node).dtype
    out = to.declare("attention", [(to.plan.batch, wide) for wide in columns], dtype)
    to.put(node, out)
    for rank in range(to.ranks):
        values, lse = to.where(bound["values"], rank), to.where(bound["lse"], rank)
        spans = to.buffers[values].shape[2]
        at = ReduceOperands(rank, _layer(to, bound), values, lse, out + rank, spans, width)
        heads = columns[rank] // width
        for sequence in range(to.plan.batch):
            for run in to.plan.head_runs(heads, heads * to.plan.batch):
                to.instructions.append(AttentionReduce(at, sequence, run))


def _layer(to: Building, bound: dict[str, Any]) -> int:
    """That of the partials."""
    partials = bound["values"].args[0]
    layer: int = to.bound(partials)["layer"]
    return layer
