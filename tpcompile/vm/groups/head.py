"""The end of a step: logits, the best logit of each instruction, and the next token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import fx

from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ALL_GATHER, ARGMAX, NORM_LINEAR
from tpcompile.vm.groups.normed import NormedOperands, linear, normed
from tpcompile.vm.groups.rows import ROWS_READERS, norm_rows
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.lowering.handlers import lowers, read_by
from tpcompile.vm.program import Format, Role, rules
from tpcompile.vm.program.instruction import (
    NONE,
    Memory,
    Probe,
    Range,
    StepInstruction,
    WeightInstruction,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values


@dataclass(frozen=True)
class HeadOperands(NormedOperands):
    """The vocabulary rows of a rank, which begin with the row of token `first`."""

    weight: Annotated[int, rules.weight("vocabulary", "normed.width").reads("rows")]
    bias: Annotated[int, rules.maybe(rules.weight("vocabulary").reads("rows"))]
    logits: Annotated[
        int,
        rules.sole(Role.LOGITS, "normed.batch", "vocabulary", dtype="float").writes(":", "rows"),
    ]
    best: Annotated[
        int, rules.scratch("normed.batch", "slots", dtype=rules.F32).writes(":", "slot")
    ]
    """`[batch, slots]`: the highest logit of each instruction; `ids` has the token of each."""
    ids: Annotated[int, rules.scratch("normed.batch", "slots", dtype=rules.I32).writes(":", "slot")]
    first: Annotated[int, rules.Number(0, "2147483647 - vocabulary")]
    format: Annotated[Format, rules.FormatOf("weight")]


@instruction
@dataclass(frozen=True)
class NormLmHead(WeightInstruction):
    """The logits of some vocabulary rows, and the best of them."""

    at: HeadOperands
    rows: Annotated[Range, rules.Within("vocabulary")]
    slot: Annotated[int, rules.Number(0, "slots - 1")]
    apart: ClassVar[tuple[str, ...]] = ("rows", "slot")
    name: ClassVar[str] = "norm_lm_head"
    opcode: ClassVar[int] = 10

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Execute the instruction. Of equal logits, the one of the lowest row is the best."""
        operands = self.at
        x = operands.normed.value(memory, probe, "final_norm")
        logits = linear(memory, x, operands.weight, operands.bias, self.rows)
        memory[operands.logits][:, self.rows.slice] = logits
        best = logits.argmax(-1)
        memory[operands.best][:, self.slot] = logits.gather(-1, best[:, None])[:, 0].float()
        memory[operands.ids][:, self.slot] = (best + operands.first + self.rows.start).int()

    def meaning(self, values: Values) -> Iterator[Result]:
        logits, slot = self.at.normed.projected(values), (None, self.slot)
        yield Result("logits", logits)
        yield Result("best", values.call("best of rows", logits, *self.rows), slot)
        yield Result("ids", values.call("its row", logits, *self.rows, self.at.first), slot)

    def report(self, memory: Memory, probe: Probe) -> None:
        logits = memory[self.at.logits][:, self.rows.slice]
        probe("logits", Range(0, self.at.normed.batch), self.rows, logits)


@dataclass(frozen=True)
class ArgmaxOperands:
    """The best logits of all ranks, in consecutive buffers, and the state of the sequences."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    best: Annotated[int, rules.scratch("batch", "slots", dtype=rules.F32, each_rank=True).reads()]
    ids: Annotated[int, rules.scratch("batch", "slots", dtype=rules.I32, each_rank=True).reads()]
    ranks: Annotated[int, rules.RANKS]
    slots: Annotated[int, rules.COUNT]
    batch: Annotated[int, rules.COUNT]
    tokens: Annotated[int, rules.sole(Role.TOKENS, "batch").writes()]
    positions: Annotated[int, rules.sole(Role.POSITIONS, "batch").reads().writes()]
    lengths: Annotated[int, rules.sole(Role.LENGTHS, "batch").reads().writes()]
    finished: Annotated[int, rules.sole(Role.FINISHED, "batch").reads().writes()]
    stops: Annotated[int, rules.sole(Role.STOPS, "most_stops").reads()]
    """The tokens that end a sequence. An entry that is not a token is unused."""
    most_stops: Annotated[int, rules.COUNT]
    clock: Annotated[int, rules.sole(Role.CLOCK, "1").reads().writes()]
    """The number of steps that this launch has run."""
    history: Annotated[int, rules.sole(Role.HISTORY, "steps", "batch").writes()]
    steps: Annotated[int, rules.COUNT]


_ADVANCED = ("positions", "lengths", "finished", "clock")


@instruction
@dataclass(frozen=True)
class Argmax(StepInstruction):
    """The next token of each sequence, which is the next input unless the sequence has ended.

    A sequence that has ended keeps its state, and so does an empty one; the history records -1
    for them.
    """

    at: ArgmaxOperands
    name: ClassVar[str] = "argmax"
    opcode: ClassVar[int] = 11

    @property
    def traffic(self) -> int:
        return 8 * self.at.ranks * self.at.slots * self.at.batch

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Choose the tokens. Slots are in token order, so the first maximum is the lowest token."""
        operands = self.at
        best = torch.cat([memory[operands.best + rank] for rank in range(operands.ranks)], 1)
        ids = torch.cat([memory[operands.ids + rank] for rank in range(operands.ranks)], 1)
        tokens = ids.gather(1, best.argmax(1)[:, None])[:, 0]
        ended = (memory[operands.finished] != 0) | (memory[operands.lengths] == 0)
        stops = (tokens[:, None] == memory[operands.stops]).any(1)
        step = int(memory[operands.clock])
        memory[operands.history][step] = tokens.where(~ended, NONE)
        memory[operands.clock][0] = step + 1
        memory[operands.finished][stops & ~ended] = 1
        goes_on = ~ended & ~stops
        memory[operands.tokens][goes_on] = tokens[goes_on]
        memory[operands.positions][goes_on] += 1
        memory[operands.lengths][goes_on] += 1

    def meaning(self, values: Values) -> Iterator[Result]:
        slots = [(rank, slot) for rank in range(self.at.ranks) for slot in range(self.at.slots)]
        best, ids = (
            [values.part(name, None, slot, rank=rank) for rank, slot in slots]
            for name in ("best", "ids")
        )
        chosen = values.call("greatest", *best, *ids)
        read = [values[name] for name in (*_ADVANCED, "stops")]
        for name in (*_ADVANCED, "tokens", "history"):
            yield Result(name, values.call(f"next {name}", chosen, *read))

    def report(self, memory: Memory, probe: Probe) -> None:
        operands = self.at
        tokens = memory[operands.history][int(memory[operands.clock]) - 1]
        probe("token", Range(0, operands.batch), Range(0, 1), tokens[:, None])


@lowers(NORM_LINEAR, where=read_by(ARGMAX, ALL_GATHER, *ROWS_READERS))
def norm_linear(builder: Building, node: fx.Node) -> None:
    """Lower the head, or a linear that another instruction of the layer reads."""
    if any(user.target in ROWS_READERS for user in node.users):
        norm_rows(builder, node)
    else:
        _norm_head(builder, node)


def _norm_head(builder: Building, node: fx.Node) -> None:
    """Lower the head to vocabulary blocks, equally many per rank, so that `best` has one shape."""
    bound = builder.bound(node)
    kind, columns = value_type(node), builder.local_columns(node)
    if not isinstance(kind.layout_of(1), Layout | None):
        raise builder.refusal(node, "the rows of the head are in several parts on each rank")
    batch = builder.plan.batch
    logits = builder.declare(
        Role.LOGITS.word, [(batch, width) for width in columns], kind.dtype, Role.LOGITS
    )
    builder.put(node, logits)
    slots = min(len(builder.plan.blocks(width)) for width in columns)
    best = builder.alike("best_logits", (batch, slots), torch.float32)
    ids = builder.alike("best_ids", (batch, slots), torch.int32)
    for rank in range(builder.ranks):
        operands = HeadOperands(
            rank=rank,
            layer=NONE,
            normed=normed(builder, node, rank),
            weight=builder.buffer(bound["weight"], rank),
            bias=builder.buffer_if(bound["bias"], rank),
            logits=logits + rank,
            best=best + rank,
            ids=ids + rank,
            first=_first_row(node, rank),
            format=value_type(bound["weight"]).stored,
        )
        blocks = builder.plan.pieces(columns[rank], slots)
        builder.deal(NormLmHead(operands, rows, slot) for slot, rows in enumerate(blocks))


def _first_row(node: fx.Node, rank: int) -> int:
    layout = value_type(node).layout_of(1)
    return 0 if layout is None else layout.intervals(rank)[0][0]  # type: ignore[union-attr]


@lowers(ARGMAX, where=read_by())
def argmax(builder: Building, node: fx.Node) -> None:
    """Lower argmax to one instruction per rank, which reads the best logits of all ranks."""
    (logits,) = node.all_input_nodes
    builder.buffer(logits, 0)  # raises if the logits are not from a head
    plan, batch = builder.plan, builder.plan.batch
    best, ids = builder.number("best_logits"), builder.number("best_ids")
    numbers = {
        "tokens": builder.sole(Role.TOKENS, (batch,)),
        "positions": builder.sole(Role.POSITIONS, (batch,)),
        "lengths": builder.sole(Role.LENGTHS, (batch,)),
        "finished": builder.sole(Role.FINISHED, (batch,)),
        "stops": builder.sole(Role.STOPS, (plan.stops,)),
        "clock": builder.sole(Role.CLOCK, (1,)),
        "history": builder.sole(Role.HISTORY, (plan.steps, batch)),
    }
    builder.put(node, numbers["tokens"])
    for rank in range(builder.ranks):
        operands = ArgmaxOperands(
            rank=rank,
            layer=NONE,
            best=best,
            ids=ids,
            ranks=builder.ranks,
            slots=builder.buffers[best].shape[1],
            batch=batch,
            most_stops=plan.stops,
            steps=plan.steps,
            **{name: number + rank for name, number in numbers.items()},
        )
        builder.instructions.append(Argmax(operands))
