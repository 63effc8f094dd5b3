"""The instruction of an embedding with a scale: an embedding with one more operand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import fx

from tpcompile.vm.groups.embed import Embed, EmbedOperands, embedding
from tpcompile.vm.lowering.building import Building
from tpcompile.vm.lowering.handlers import lowers
from tpcompile.vm.program import rules
from tpcompile.vm.program.instruction import Memory, Probe, Range, to_fp32, unseen
from tpcompile.vm.program.instruction_set import instruction
from tpcompile.vm.program.meaning import Result, Values
from tpcompile_granite.ops import SCALED_EMBEDDING


@dataclass(frozen=True)
class ScaledEmbedOperands(EmbedOperands):
    """The operands of an embedding, and the number that multiplies it."""

    scale: Annotated[float, rules.Real()]


@instruction
@dataclass(frozen=True)
class ScaledEmbed(Embed):
    """Some columns of the tokens' embedding rows, times a number."""

    at: ScaledEmbedOperands
    name: ClassVar[str] = "scaled_embed"
    opcode: ClassVar[int] = 256

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Look up the rows and multiply them."""
        super().run(memory, probe)
        memory[self.at.out][: self.at.batch, self.columns.slice] *= self.at.scale

    def meaning(self, values: Values) -> Iterator[Result]:
        """Yield the rows, times the number: the op, of which the instruction makes columns."""
        operands = self.at
        rows = SCALED_EMBEDDING(values["table"], values["tokens"], operands.scale, operands.first)
        yield Result("out", rows, (Range(0, operands.batch),))


@lowers(SCALED_EMBEDDING, terms=True)
def scaled_embedding(builder: Building, node: fx.Node) -> None:
    """Lower the node like an embedding. If ranks have parts of the table, a sum follows."""
    embedding(builder, node, ScaledEmbed, scale=to_fp32(builder.bound(node)["scale"]))
