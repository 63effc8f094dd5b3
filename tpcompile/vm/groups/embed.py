"""The embedding rows of the tokens, with which a step begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import EMBEDDINGS, VOCAB_EMBEDDING
from tpcompile.vm.groups.residual import Site, residual_buffer, terms_buffer
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import Format, Role, rules
from tpcompile.vm.program.fields import operands_of
from tpcompile.vm.program.instruction import NONE, Memory, Probe, Range, StepInstruction, unseen
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values

_COLUMNS = (":batch", "columns")


@dataclass(frozen=True)
class EmbedOperands:
    """`tokens[batch]`, and the table rows of a rank, which begin with the row of token `first`."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.LABEL]
    tokens: Annotated[int, rules.sole(Role.TOKENS, "batch").reads()]
    table: Annotated[int, rules.weight("rows", "width").reads(":", "columns")]
    out: Annotated[
        int,
        rules.Chosen(
            "summed",
            {
                True: rules.scratch("slots*batch", "width", dtype=rules.F32).writes(*_COLUMNS),
                False: rules.scratch("batch", "width").writes(*_COLUMNS),
            },
        ),
    ]
    batch: Annotated[int, rules.COUNT]
    first: Annotated[int, rules.Number(0, "2147483647 - rows")]
    rows: Annotated[int, rules.COUNT]
    format: Annotated[Format, rules.FormatOf("table")]
    summed: bool
    """Whether `out` is this rank's term of a sum, because other ranks have the other rows."""


@instruction
@dataclass(frozen=True)
class Embed(StepInstruction):
    """Some columns of the tokens' embedding rows; zeros for rows on other ranks."""

    at: EmbedOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "embed"
    opcode: ClassVar[int] = 1

    @property
    def traffic(self) -> int:
        return self.at.batch * self.at.format.row_bytes(*self.columns)

    @property
    def values(self) -> int:
        return self.at.batch * self.columns.extent

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Execute the instruction. Adding 0.0 turns -0.0 into 0.0, as a sum across ranks does."""
        rows = memory[self.at.tokens].long() - self.at.first
        held = (rows >= 0) & (rows < self.at.rows)
        embedded = memory[self.at.table][rows.where(held, 0), self.columns.slice]
        embedded = torch.where(held[:, None], embedded, 0) + 0.0
        memory[self.at.out][: self.at.batch, self.columns.slice] = embedded

    def meaning(self, values: Values) -> Iterator[Result]:
        operands = self.at
        embedded = VOCAB_EMBEDDING(values["table"], values["tokens"], operands.first)
        yield Result("out", embedded, (Range(0, operands.batch),))

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the rows to the probe, unless they are a term of a sum."""
        if not self.at.summed:
            batch = Range(0, self.at.batch)
            probe("embedding", batch, self.columns, memory[self.at.out][:, self.columns.slice])


@lowers(*EMBEDDINGS, terms=True)
def embedding(
    builder: Building, node: fx.Node, kind: type[Embed] = Embed, **more_operands: Any
) -> None:
    """Lower the node to the table rows of each rank. If the rows are sharded, a sum follows.

    A subclass of `Embed` may have more shared operands.
    """
    weight, ids = node.args[:2]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node)
    table = value_type(weight)
    summed = table.layout_of(0) is not None
    if summed:
        out = terms_buffer(builder, Site.EMBEDDING, node, builder.plan.column_splits)
    else:
        out = residual_buffer(builder, node, None)
    builder.put(node, out)
    for rank in range(builder.ranks):
        operands = operands_of(kind)(
            rank=rank,
            layer=NONE,
            tokens=builder.buffer(ids, rank),
            table=builder.buffer(weight, rank),
            out=out + rank,
            batch=builder.plan.batch,
            first=builder.bound(node, rank).get("first_row", 0),
            rows=table.local_extent(rank, 0),
            format=table.stored,
            summed=summed,
            **more_operands,
        )
        builder.instructions += [
            kind(operands, columns) for columns in builder.plan.sums(width_of(node))
        ]
