"""Projection, norm and rotation of Q, K and V, by whole heads or by blocks of a head's rows.

Norms and rotations apply to whole heads, never to parts of one. An instruction computes either
whole heads or a block of one head's rows. The last block of a head to arrive norms, rotates and
stores the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import NORM_QKV_ROPE_APPEND
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
    arrivals: Annotated[int, rules.sole(Role.ARRIVALS, "all_heads").joins("place")]
    head: Annotated[int, rules.Number(0, "heads - 1")]
    rows: Annotated[Range, rules.Within("width")]
    blocks: Annotated[int, rules.Number(1, "width")]
    weight_rows = Interval("first_row + head*width + rows")
    place = Interval("first_head + head")
    """The head among the heads of all three parts."""
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

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the head to the probe if this was its last block."""
        if int(memory[self.arrivals][self.place.start]) % self.blocks == 0:
            self.at.report(memory, Range(self.head, self.head + 1), probe)


@lowers(NORM_QKV_ROPE_APPEND)
def norm_qkv(to: Building, node: fx.Node) -> None:
    """Lower the node to the queries, then the keys, then the values of each rank."""
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
            to.deal(_heads(to, at, heads, sum(counts)))
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
        head_eps=to_fp32(bound["head_eps"]),
        cos=to.sole(Role.COS, (longest, width), dtype) + rank,
        sin=to.sole(Role.SIN, (longest, width), dtype) + rank,
        longest=longest,
        interleaved=bound["interleaved"],
        positions=to.sole(Role.POSITIONS, (to.plan.batch,)) + rank,
        width=width,
        out=out,
        format=value_type(bound["weight"]).stored,
        **places(to, bound["block"], rank),
    )


LOWERING_OF: Mapping[str, str] = MappingProxyType(
    {NormQkvRopeAppend.name: "heads", NormQkvRows.name: "rows"}
)
"""The lowering that makes each of these instructions, by name."""


def _heads(
    to: Building, at: QkvOperands, heads: int, of: int
) -> Iterator[NormQkvRopeAppend | NormQkvRows]:
    """Yield one part's heads, whole or in blocks of rows; `of` is the number in all parts."""
    if not to.plan.splits_heads(of):
        yield from (NormQkvRopeAppend(at, run) for run in to.plan.head_runs(heads, of))
        return
    blocks = to.plan.row_blocks(at.width, of)
    wide = [(to.plan.batch, rows) for rows in _rows_per_rank(to, at)]
    raw = to.declare("raw_qkv", wide, to.buffers[at.normed.x].dtype) + at.rank
    counts = [(rows // at.width,) for _, rows in wide]
    arrivals = to.declare(Role.ARRIVALS.word, counts, torch.int32, Role.ARRIVALS) + at.rank
    for head in range(heads):
        for rows in blocks:
            yield NormQkvRows(at, raw, arrivals, head, rows, len(blocks))


def _rows_per_rank(to: Building, at: QkvOperands) -> list[int]:
    first = at.weight - at.rank
    return [to.buffers[first + rank].shape[0] for rank in range(to.ranks)]
