"""Projection, norm and rotation of Q, K and V, by whole heads or by blocks of a head's rows.

An instruction computes heads of one part, from rows of one weight. The weight has the rows of all
parts, or the parts have a weight each, which may differ in format.

Norms and rotations apply to whole heads, never to parts of one. An instruction computes either
whole heads or a block of one head's rows. The last block of a head to arrive norms, rotates and
stores the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import NORM_QKV_ROPE_APPEND, QKV_OPS
from tpcompile.vm.groups.kv import cache_of, places
from tpcompile.vm.groups.normed import normed
from tpcompile.vm.groups.qkv_operands import Part, QkvOperands, stored
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Role, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import (
    Memory,
    Probe,
    Range,
    WeightInstruction,
    to_fp32,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


@instruction
@dataclass(frozen=True)
class NormQkvRopeAppend(WeightInstruction):
    """Whole heads of queries, keys or values; keys and values are stored in the cache."""

    at: Annotated[QkvOperands, {"out": stored("writes", "heads")}]
    heads: Annotated[Range, rules.Within("heads")]
    weight_rows = Interval("first_row + heads*width")
    name: ClassVar[str] = "norm_qkv_rope_append"
    opcode: ClassVar[int] = 2

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        self.at.finish(memory, self.heads, self.at.project(memory, self.weight_rows, probe), probe)

    def meaning(self, values: Values) -> Iterator[Result]:
        yield self.at.meaning(values)

    def report(self, memory: Memory, probe: Probe) -> None:
        self.at.report(memory, self.heads, probe)


@instruction
@dataclass(frozen=True)
class NormQkvRows(WeightInstruction):
    """A block of one head's rows; the last of the head's `blocks` to arrive finishes the head."""

    at: Annotated[QkvOperands, {"out": stored("joins", "head")}]
    raw: Annotated[
        int, rules.scratch("normed.batch", "all_heads*width").joins(":", "raw_head", turn=1)
    ]
    arrivals: Annotated[
        int, rules.BufferRule(Role.ARRIVALS, ("all_heads",), rules.I32).joins("place")
    ]
    head: Annotated[int, rules.Number(0, "heads - 1")]
    rows: Annotated[Range, rules.Within("width")]
    blocks: Annotated[int, rules.Number(1, "width")]
    weight_rows = Interval("first_row + head*width + rows")
    place = Interval("first_head + head")
    """The head among the heads in the weight."""
    raw_head = Interval("first_row + head*width")
    arrival: ClassVar[rules.Arrival] = rules.Arrival("rows", "width", "blocks", "finishing")
    name: ClassVar[str] = "norm_qkv_rows"
    opcode: ClassVar[int] = 3

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        brought = self.at.project(memory, self.weight_rows, probe)
        memory[self.raw][:, self.weight_rows.slice] = brought
        arrived = memory[self.arrivals][self.place.start] + 1
        memory[self.arrivals][self.place.start] = arrived
        if int(arrived) % self.blocks == 0:
            whole = memory[self.raw][:, self.raw_head.slice]
            self.at.finish(memory, Range(self.head, self.head + 1), whole, probe)

    def meaning(self, values: Values) -> Iterator[Result]:
        yield self.at.meaning(values)

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the head to the probe if this was its last block."""
        if int(memory[self.arrivals][self.place.start]) % self.blocks == 0:
            self.at.report(memory, Range(self.head, self.head + 1), probe)


class _Source(NamedTuple):
    """The linear that computes a part, and the place of the part among its rows."""

    parts: str
    """The parts whose rows the weight has: `qkv`, or the name of the part alone."""
    weight: fx.Node
    bias: fx.Node | None
    first_row: int
    heads: int


@lowers(*QKV_OPS)
def norm_qkv(builder: Building, node: fx.Node) -> None:
    """Lower the node to the queries, then the keys, then the values of each rank."""
    q = builder.declare(
        "q",
        [(builder.plan.batch, width) for width in builder.local_columns(node)],
        value_type(node).dtype,
    )
    builder.put(node, q)
    cache = cache_of(builder, builder.bound(node)["cache"], builder.bound(node)["block"])
    for rank in range(builder.ranks):
        sources = _sources(builder, node, rank)
        all_heads = sum(source.heads for source in sources.values())
        for part, source in sources.items():
            out = q if part == Part.Q else cache
            operands = _qkv_operands(builder, node, rank, part, source, out + rank)
            builder.deal(_heads(builder, operands, source, all_heads))


def _sources(builder: Building, node: fx.Node, rank: int) -> dict[Part, _Source]:
    """Return the sources of queries, keys and values on a rank, in this order."""
    bound = builder.bound(node, rank)
    width = width_of(node)
    sources: dict[Part, _Source] = {}
    first = 0
    for place, part in enumerate((Part.Q, Part.K, Part.V)):
        if node.target is NORM_QKV_ROPE_APPEND:
            heads = bound["heads"][place]
            sources[part] = _Source("qkv", bound["weight"], bound["bias"], first, heads)
            first += heads * width
        else:
            name = part.name.lower()
            weight, bias = bound[f"{name}_weight"], bound[f"{name}_bias"]
            rows = value_type(weight).local_extent(rank, 0)
            sources[part] = _Source(name, weight, bias, 0, rows // width)
    return sources


def _qkv_operands(
    builder: Building, node: fx.Node, rank: int, part: Part, source: _Source, out: int
) -> QkvOperands:
    bound = builder.bound(node)
    width, rotated = width_of(node), width_of(bound["cos"])
    head_norm = {Part.Q: bound["q_norm"], Part.K: bound["k_norm"], Part.V: None}[part]
    longest, dtype = builder.plan.max_seq_len, value_type(bound["cos"]).dtype
    return QkvOperands(
        rank=rank,
        layer=bound["layer"],
        part=part,
        normed=normed(builder, node, rank),
        weight=builder.buffer(source.weight, rank),
        bias=builder.buffer_if(source.bias, rank),
        first_row=source.first_row,
        head_norm=builder.buffer_if(head_norm, rank),
        head_eps=to_fp32(bound["head_eps"]),
        cos=builder.sole(Role.COS, (longest, rotated), dtype) + rank,
        sin=builder.sole(Role.SIN, (longest, rotated), dtype) + rank,
        longest=longest,
        rotated=rotated,
        interleaved=bound["interleaved"],
        positions=builder.sole(Role.POSITIONS, (builder.plan.batch,)) + rank,
        width=width,
        out=out,
        format=value_type(source.weight).stored,
        **places(builder, bound["block"], rank),
    )


LOWERING_OF: Mapping[str, str] = MappingProxyType(
    {NormQkvRopeAppend.name: "heads", NormQkvRows.name: "rows"}
)
"""The lowering that makes each of these instructions, by name."""


def _heads(
    builder: Building, operands: QkvOperands, source: _Source, all_heads: int
) -> Iterator[NormQkvRopeAppend | NormQkvRows]:
    """Yield one part's heads, whole or in blocks of rows; all parts have `all_heads`."""
    if not builder.plan.splits_heads(all_heads):
        runs = builder.plan.runs(source.heads, all_heads)
        yield from (NormQkvRopeAppend(operands, run) for run in runs)
        return
    blocks = builder.plan.row_blocks(operands.width, all_heads)
    shapes = [(builder.plan.batch, rows) for rows in _rows_per_rank(builder, operands)]
    dtype = builder.buffers[operands.normed.x].dtype
    raw = builder.declare(f"raw_{source.parts}", shapes, dtype) + operands.rank
    counts = [(rows // operands.width,) for _, rows in shapes]
    name = Role.ARRIVALS.word if source.parts == "qkv" else f"{Role.ARRIVALS.word}_{source.parts}"
    arrivals = builder.declare(name, counts, torch.int32, Role.ARRIVALS) + operands.rank
    for head in range(source.heads):
        for rows in blocks:
            yield NormQkvRows(operands, raw, arrivals, head, rows, len(blocks))


def _rows_per_rank(builder: Building, operands: QkvOperands) -> list[int]:
    first = operands.weight - operands.rank
    return [builder.buffers[first + rank].shape[0] for rank in range(builder.ranks)]
