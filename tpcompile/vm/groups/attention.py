"""Attention in spans. Each span has its own maximum and sum; a fixed tree merges the spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.kv import loaded_rows
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION_REDUCE, GATED_ATTENTION_REDUCE, PARTIAL_ATTENTION
from tpcompile.ir.ops.cache import HEADS
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.ir.ops.decode import merge, span_of
from tpcompile.ir.ops.elementwise import SIGMOID_GATE
from tpcompile.ir.ops.groups import heads_read, runs_of
from tpcompile.ir.ops.paged_attention import read_tokens
from tpcompile.ir.ops.shape import FLATTEN, UNFLATTEN
from tpcompile.vm.groups.arithmetic import dots, exp, log, sigmoid, total
from tpcompile.vm.groups.kv import cache_of, places, stored_tokens, together
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Format, Role, rules
from tpcompile.vm.program.accesses import Interval
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    to_fp32,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import HeadRead, Result, Values

_VALUES = rules.scratch("batch", "heads", "spans", "width", dtype=rules.F32)
_LSE = rules.scratch("batch", "heads", "spans", dtype=rules.F32)


@dataclass(frozen=True)
class AttentionOperands:
    """The queries of one layer, its cache, and the partial results of every span."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.Number(0, "layers - 1")]
    q: Annotated[
        int, rules.scratch("batch", "heads*width", dtype="T").reads("sequences", "heads*width")
    ]
    cache: Annotated[
        int,
        rules.cache("kv_heads", dtype="T")
        .reads("layer", ":", "sequences", "kv_head", "0")
        .reads("layer", ":", "together", "kv_head", "1", unless=("is_past", 1)),
    ]
    lengths: Annotated[int, rules.sole(Role.LENGTHS, "batch").reads("sequences")]
    tables: Annotated[int, rules.sole(Role.TABLES, "batch", "most_blocks").reads("sequences")]
    most_blocks: Annotated[int, rules.COUNT]
    values: Annotated[int, _VALUES.writes("sequences", "heads", "span")]
    lse: Annotated[int, _LSE.writes("sequences", "heads", "span")]
    width: Annotated[int, rules.COUNT]
    scale: Annotated[float, rules.Real()]
    window: Annotated[int, rules.Number(1, optional=True)]
    block: Annotated[int, rules.COUNT]
    spans: Annotated[int, rules.COUNT]
    planned: Annotated[int, rules.COUNT]
    """The tokens per sequence that the cost assumes. The result is correct for any number."""
    sequence_rows: Annotated[int, rules.ALIKE]
    format: Annotated[Format, rules.FormatOf("cache")]


@instruction
@dataclass(frozen=True)
class PartialAttention(StepInstruction):
    """Attention of some sequences to some spans of their blocks: the query heads of one KV head.

    If several rows may belong to one sequence, each reads the new tokens of the rows before it.
    Their sequences are known only within the step, so every span reads the new tokens of all of
    them. Otherwise only the last span reads the new token.
    """

    at: AttentionOperands
    sequences: Annotated[Range, rules.Within("batch")]
    kv_head: Annotated[int, rules.Number(0, "kv_heads - 1")]
    heads: Annotated[Range, rules.Within("heads")]
    span: Annotated[Range, rules.Within("spans")]
    reads_head: ClassVar[HeadRead] = HeadRead("kv_head", "heads")
    immaterial: ClassVar[tuple[str, ...]] = ("planned",)
    name: ClassVar[str] = "partial_attention"
    opcode: ClassVar[int] = 4

    @property
    def together(self) -> Range:
        """The rows that may belong to one sequence with some of these."""
        return together(self.sequences, self.at.sequence_rows)

    @property
    def is_past(self) -> bool:
        """Whether the spans have no new token."""
        return self.at.sequence_rows == 1 and self.span.stop < self.at.spans

    @property
    def planned(self) -> int:
        """The tokens of a sequence that the cost assumes, regardless of the window."""
        operands = self.at
        first, _ = span_of(operands.planned, operands.block, self.span.start, operands.spans, None)
        _, last = span_of(
            operands.planned, operands.block, self.span.stop - 1, operands.spans, None
        )
        return last - first

    @property
    def traffic(self) -> int:
        """The bytes of the keys and values; rows of one sequence read its tokens once."""
        size = 2 * self.planned * self.at.format.row_bytes(0, self.at.width)
        return size * -(-self.sequences.extent // self.at.sequence_rows)

    @property
    def work(self) -> int:
        return 2 * self.values * self.at.width

    @property
    def values(self) -> int:
        """The scores, which an exponential turns into weights."""
        return self.planned * self.heads.extent * self.sequences.extent

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        for row, span in product(range(*self.sequences), range(*self.span)):
            self._attend(memory, row, span)

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        window = None if operands.window == NONE else operands.window
        places = values["tables"], values["lengths"]
        partials = PARTIAL_ATTENTION(
            UNFLATTEN(values["q"], 1, [-1, operands.width]),
            stored_tokens(values, operands.layer),
            *places,
            operands.scale,
            window,
            operands.layer,
            operands.block,
            operands.spans,
            values.heads,
        )
        for name, value in zip(("values", "lse"), partials, strict=True):
            yield Result(name, value)

    def _attend(self, memory: Memory, row: int, span: int) -> None:
        operands = self.at
        values, lse = memory[operands.values][row, self.heads.slice, span], memory[operands.lse]
        length = int(memory[operands.lengths][row])
        window = None if operands.window == NONE else operands.window
        first, last = span_of(length, operands.block, span, operands.spans, window)
        if first == last:
            values.zero_()
            lse[row, self.heads.slice, span] = -torch.inf
        else:
            table = memory[operands.tables][row].long()
            slots = memory[operands.cache][operands.layer][:, :, self.kv_head].transpose(0, 1)
            rows = read_tokens(slots, table, first, last, operands.block)
            k, v = loaded_rows(rows).float().unbind(1)
            q = memory[operands.q][row].view(-1, operands.width)[self.heads.slice].float()
            values[:], lse[row, self.heads.slice, span] = attend_span(q, k, v, operands.scale)

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the partials to the probe. Columns are in order of heads, then of spans."""
        operands, rows = self.at, self.sequences
        for head, span in product(range(*self.heads), range(*self.span)):
            place = head * operands.spans + span
            lse = memory[operands.lse][rows.slice, head, span]
            probe("partial_lse", rows, Range(place, place + 1), lse[:, None])
            columns = Range(place * operands.width, (place + 1) * operands.width)
            probe("partial_values", rows, columns, memory[operands.values][rows.slice, head, span])


def attend_span(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend `q[heads, width]` to `k` and `v[tokens, width]`; return values and log-sum-exp."""
    scores = dots(q, k) * scale
    most = scores.amax(-1)
    weights = exp(scores - most[:, None])
    mass = total(weights)
    mixed = dots(weights, v.t())
    return mixed / mass[:, None], most + log(mass)


_MIXED = rules.scratch("batch", "heads*width")


@dataclass(frozen=True)
class ReduceOperands:
    """The partial results of every span, and the attention that they merge to."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    values: Annotated[int, _VALUES.reads("sequence", "heads")]
    lse: Annotated[int, _LSE.reads("sequence", "heads")]
    out: Annotated[int, _MIXED.writes("sequence", "columns")]
    spans: Annotated[int, rules.COUNT]
    width: Annotated[int, rules.COUNT]
    gate: Annotated[int, rules.maybe(_MIXED.reads("sequence", "columns"))] = NONE


@instruction
@dataclass(frozen=True)
class AttentionReduce(StepInstruction):
    """The attention of some heads of one sequence: neighbouring spans are merged in a tree.

    If there are gates, it is multiplied by their sigmoid.
    """

    at: ReduceOperands
    sequence: Annotated[int, rules.Number(0, "batch - 1")]
    heads: Annotated[Range, rules.Within("heads")]
    columns = Interval("heads*width")
    name: ClassVar[str] = "attention_reduce"
    opcode: ClassVar[int] = 5

    @property
    def traffic(self) -> int:
        return 4 * self.values

    @property
    def values(self) -> int:
        return self.at.spans * self.columns.extent

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        values = memory[self.at.values][self.sequence, self.heads.slice]
        lse = memory[self.at.lse][self.sequence, self.heads.slice]
        spans = list(zip(values.unbind(1), lse.unbind(1), strict=True))
        mixed, _ = fold_tree(spans, partial(merge, exp=exp, log=log))
        out = memory[self.at.out]
        attended = mixed.flatten().to(out.dtype)
        if self.at.gate != NONE:
            probe("ungated", Range(self.sequence, self.sequence + 1), self.columns, attended[None])
            gate = memory[self.at.gate][self.sequence, self.columns.slice]
            attended = attended * sigmoid(gate.float()).to(out.dtype)
        out[self.sequence, self.columns.slice] = attended

    def meaning(self, values: Values) -> Iterator[Result]:
        partials = values["values"]
        mixed = ATTENTION_REDUCE(partials, values["lse"], partials.dtype)  # rounded when stored
        attended, gate = FLATTEN(mixed, 1, 2), values["gate"]
        yield Result("out", attended if gate is None else SIGMOID_GATE(attended, gate))

    def report(self, memory: Memory, probe: Probe) -> None:
        row = Range(self.sequence, self.sequence + 1)
        probe("attention", row, self.columns, memory[self.at.out][row.slice, self.columns.slice])


@lowers(PARTIAL_ATTENTION)
def partial_attention(builder: Building, node: fx.Node) -> None:
    """Lower the node to instructions for each KV head, with runs of rows and of spans.

    Rows that may belong to one sequence share an instruction, which then reads its tokens once. The
    runs are short enough to keep all workers busy. So a large batch, which has enough sequences for
    that, avoids an instruction per span.
    """
    bound = builder.bound(node)
    spans = bound["spans"]
    builder.plan.check_spans(spans, bound["block"])
    queries = value_type(bound["q"])
    dims: list[Any] = [queries.local_shape(rank)[1:] for rank in range(builder.ranks)]
    batch = builder.plan.batch
    values = builder.declare(
        "partial_values", [(batch, h, spans, w) for h, w in dims], torch.float32
    )
    lse = builder.declare("partial_lse", [(batch, h, spans) for h, _ in dims], torch.float32)
    builder.put(node, values)
    for rank in range(builder.ranks):
        operands = _attention_operands(builder, node, rank, values + rank, lse + rank, spans)
        readers = list(_readers(builder, node, rank))
        works = batch * len(readers) * spans
        rows = builder.plan.runs(operands.sequence_rows, works)
        runs = builder.plan.runs(spans, works // max(run.extent for run in rows))
        for first, local_rows in product(range(0, batch, operands.sequence_rows), rows):
            sequences = Range(first + local_rows.start, first + local_rows.stop)
            for (kv_head, heads), run in product(readers, runs):
                builder.instructions.append(
                    PartialAttention(operands, sequences, kv_head, heads, run)
                )


def _attention_operands(
    builder: Building, node: fx.Node, rank: int, values: int, lse: int, spans: int
) -> AttentionOperands:
    bound = builder.bound(node)
    block, context = bound["block"], min(builder.plan.context, builder.plan.max_seq_len)
    return AttentionOperands(
        rank=rank,
        layer=bound["layer"],
        q=builder.buffer(bound["q"], rank),
        cache=cache_of(builder, bound["cache"], block) + rank,
        values=values,
        lse=lse,
        width=width_of(bound["q"]),
        scale=to_fp32(bound["scale"]),
        window=NONE if bound["window"] is None else bound["window"],
        spans=spans,
        planned=context,
        sequence_rows=builder.plan.sequence_rows,
        format=value_type(bound["cache"]).stored,
        **places(builder, block, rank),
    )


def _readers(builder: Building, node: fx.Node, rank: int) -> Iterator[tuple[int, Range]]:
    """Yield the KV heads of a rank, each with a run of query heads that read it."""
    bound = builder.bound(node, rank)
    heads = value_type(bound["q"]).local_shape(rank)[1]
    shared = value_type(bound["cache"]).local_shape(rank)[HEADS]
    assert isinstance(heads, int) and isinstance(shared, int)
    for kv_head, first, last in runs_of(heads_read(heads, shared, bound["kv_heads"])):
        yield kv_head, Range(first, last + 1)


@lowers(ATTENTION_REDUCE, GATED_ATTENTION_REDUCE)
def attention_reduce(builder: Building, node: fx.Node) -> None:
    """Lower the merge to runs of heads per sequence, short enough to keep all workers busy."""
    bound = builder.bound(node)
    columns = builder.local_columns(node)
    width, dtype = width_of(bound["values"]), value_type(node).dtype
    gate = bound.get("gate")
    out = builder.declare("attention", [(builder.plan.batch, extent) for extent in columns], dtype)
    builder.put(node, out)
    for rank in range(builder.ranks):
        values, lse = builder.buffer(bound["values"], rank), builder.buffer(bound["lse"], rank)
        spans = builder.buffers[values].shape[2]
        gates = builder.buffer_if(gate, rank)
        operands = ReduceOperands(
            rank, _layer(builder, bound), values, lse, out + rank, spans, width, gates
        )
        heads = columns[rank] // width
        for sequence in range(builder.plan.batch):
            for run in builder.plan.runs(heads, heads * builder.plan.batch):
                builder.instructions.append(AttentionReduce(operands, sequence, run))


def _layer(builder: Building, bound: dict[str, Any]) -> int:
    """Return the layer of the partials."""
    partials = bound["values"].args[0]
    layer: int = builder.bound(partials)["layer"]
    return layer
