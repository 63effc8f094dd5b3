"""The instruction of an embedding with a scale: operands, meaning and lowering."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.vm.groups.residual import Site, residual_buffer, terms_buffer
from tpcompile.vm.lowering.building import Building, width_of
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import DType, Role, rules
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
from tpcompile_granite.ops import SCALED_EMBEDDING

_COLUMNS = (":batch", "columns")


@dataclass(frozen=True)
class ScaledEmbedOperands:
    """The new `tokens[batch]`, a rank's rows of the table, and the number that multiplies them."""

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
    dtype: Annotated[DType, rules.DTypeOf("table")]
    scale: Annotated[float, rules.Real()]
    summed: bool
    """Whether `out` is this rank's term of a sum, because other ranks have the other rows."""


@instruction
@dataclass(frozen=True)
class ScaledEmbed(StepInstruction):
    """Some columns of the tokens' embedding rows, times a number."""

    at: ScaledEmbedOperands
    columns: Annotated[Range, rules.Within("width")]
    name: ClassVar[str] = "scaled_embed"
    opcode: ClassVar[int] = 256

    @property
    def traffic(self) -> int:
        """The bytes of the rows."""
        return self.at.batch * self.at.dtype.row_bytes(self.columns.extent)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Look up the rows. Tokens of other ranks and empty rows give zeros."""
        at = self.at
        rows = memory[at.tokens].long() - at.first
        held = (rows >= 0) & (rows < at.rows)
        found = memory[at.table][rows.where(held, 0), self.columns.slice] * at.scale
        found = found.where(held[:, None], 0)
        memory[at.out][: at.batch, self.columns.slice] = found

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the rows to the probe, unless they are a term of a sum."""
        if not self.at.summed:
            batch = Range(0, self.at.batch)
            probe("embedding", batch, self.columns, memory[self.at.out][:, self.columns.slice])


@lowers(SCALED_EMBEDDING, terms=True)
def scaled_embedding(to: Building, node: fx.Node) -> None:
    """Divide the columns among instructions. If ranks have parts of the table, a sum follows."""
    weight, ids, scale = node.args
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node) and isinstance(scale, float)
    kind = value_type(weight)
    summed = kind.layout_of(0) is not None
    out = terms_buffer(to, Site.EMBEDDING, node) if summed else residual_buffer(to, node, None)
    to.put(node, out)
    for rank in range(to.ranks):
        at = ScaledEmbedOperands(
            rank=rank,
            layer=NONE,
            tokens=to.where(ids, rank),
            table=to.where(weight, rank),
            out=out + rank,
            batch=to.plan.batch,
            first=to.bound(node, rank).get("first_row", 0),
            rows=int(kind.local_shape(rank)[0]),
            dtype=DType.of(kind.dtype),
            scale=to_fp32(scale),
            summed=summed,
        )
        to.instructions += [ScaledEmbed(at, columns) for columns in to.plan.sums(width_of(node))]
