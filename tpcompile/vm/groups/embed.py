"""The rows of the tokens: a step begins with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import torch

from tpcompile.vm.program import Region, rules
from tpcompile.vm.program.instruction import (
    Memory,
    Probe,
    Range,
    StepInstruction,
    columns_of,
    unseen,
)
from tpcompile.vm.program.instruction_set import instruction


@dataclass(frozen=True)
class EmbedOperands:
    """`tokens[batch]`, and the rows of a rank, of which the first is that of token `first`."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    tokens: Annotated[int, rules.state("tokens", "batch")]
    table: Annotated[int, rules.weight("rows", "width")]
    out: Annotated[
        int,
        rules.Chosen(
            "summed",
            {
                True: rules.scratch("slots*batch", "width", dtype=rules.F32),
                False: rules.scratch("batch", "width"),
            },
        ),
    ]
    batch: Annotated[int, rules.COUNT]
    first: Annotated[int, rules.Number(0, "2147483647 - rows")]
    rows: Annotated[int, rules.COUNT]
    item: Annotated[int, rules.ItemOf("table")]
    summed: bool
    """Whether `out` is this rank's term of a sum: other ranks have the other rows."""


@instruction
@dataclass(frozen=True)
class Embed(StepInstruction):
    """Some columns of the tokens' rows; zeros for those that are on other ranks."""

    at: EmbedOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "embed"
    opcode: ClassVar[int] = 1

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        rows = (0, self.at.rows)
        return (
            Region(self.at.tokens, ((0, self.at.batch),)),
            Region(self.at.table, (rows, self.columns)),
        )

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return (columns_of(self.at.out, self.at.batch, self.columns),)

    @property
    def traffic(self) -> int:
        return self.at.batch * self.columns.extent * self.at.item

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Zero is added to every row, as a sum across ranks adds it: minus zero becomes zero."""
        rows = memory[self.at.tokens].long() - self.at.first
        held = (rows >= 0) & (rows < self.at.rows)
        found = memory[self.at.table][rows.where(held, 0), self.columns.slice]
        found = torch.where(held[:, None], found, 0) + 0.0
        memory[self.at.out][: self.at.batch, self.columns.slice] = found
        if not self.at.summed:
            probe("embedding", Range(0, self.at.batch), self.columns, found)
