"""The choice of the experts of each sequence, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import TOP_EXPERTS
from tpcompile.vm.groups.arithmetic import exp, total
from tpcompile.vm.lowering.building import Building, layer_of, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Role, rules
from tpcompile.vm.program.instruction import NONE, Memory, Probe, Range, StepInstruction, unseen
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values

IDS = rules.scratch("batch", "chosen", dtype=rules.I32)
"""The rule of the buffer of chosen experts."""


@dataclass(frozen=True)
class ChoiceOperands:
    """The logits of a router, and the choices of all sequences."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    logits: Annotated[int, rules.scratch("batch", "experts", dtype="T").reads("sequence")]
    lengths: Annotated[int, rules.sole(Role.LENGTHS, "batch").reads("sequence")]
    scores: Annotated[int, rules.scratch("batch", "chosen", dtype="T").writes("sequence")]
    ids: Annotated[int, IDS.writes("sequence")]
    batch: Annotated[int, rules.COUNT]
    experts: Annotated[int, rules.COUNT]
    chosen: Annotated[int, rules.Number(1, "experts")]
    normalized: bool


@instruction
@dataclass(frozen=True)
class TopExperts(StepInstruction):
    """The experts of a sequence and their scores. A sequence without tokens chooses none."""

    at: ChoiceOperands
    sequence: Annotated[int, rules.Number(0, "batch - 1")]
    name: ClassVar[str] = "top_experts"
    opcode: ClassVar[int] = 17

    @property
    def traffic(self) -> int:
        """The bytes of the scores of all experts, in fp32."""
        return 4 * self.values

    @property
    def values(self) -> int:
        return self.at.experts

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        operands, row = self.at, self.sequence
        logits = memory[operands.logits][row]
        order = torch.sort(logits, descending=True, stable=True).indices[: operands.chosen]
        shares = exp(logits.float() - logits[order[0]].float())
        scores = shares[order] / total(shares)
        if operands.normalized:
            scores = scores / total(scores)
        empty = not int(memory[operands.lengths][row])
        memory[operands.scores][row] = scores.to(logits.dtype)
        memory[operands.ids][row] = torch.full_like(order, NONE) if empty else order

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        choice = TOP_EXPERTS(values["logits"], operands.chosen, operands.normalized)
        for name, value in zip(("scores", "ids"), choice, strict=True):
            yield Result(name, value)

    def report(self, memory: Memory, probe: Probe) -> None:
        row, columns = Range(self.sequence, self.sequence + 1), Range(0, self.at.chosen)
        probe("choice", row, columns, memory[self.at.ids][row.slice])
        probe("scores", row, columns, memory[self.at.scores][row.slice])


@lowers(TOP_EXPERTS)
def top_experts(builder: Building, node: fx.Node) -> None:
    """Lower the choice to one instruction per sequence. Every rank computes it."""
    bound = builder.bound(node)
    batch, shape = builder.plan.batch, (builder.plan.batch, bound["count"])
    scores = builder.alike("scores", shape, value_type(operand(node)).dtype)
    ids = builder.alike("ids", shape, torch.int32)
    assert ids == scores + builder.ranks, "an item of the result is found by its place"
    builder.put(node, scores)
    for rank in range(builder.ranks):
        operands = ChoiceOperands(
            rank=rank,
            layer=layer_of(node),
            logits=builder.buffer(bound["logits"], rank),
            lengths=builder.sole(Role.LENGTHS, (batch,)) + rank,
            scores=scores + rank,
            ids=ids + rank,
            batch=batch,
            experts=width_of(bound["logits"]),
            chosen=bound["count"],
            normalized=bound["normalized"],
        )
        builder.instructions += [TopExperts(operands, sequence) for sequence in range(batch)]
