"""The operands of queries, keys or values, and the arithmetic that all their instructions share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import torch

from tpcompile.ir.kv import stored_rows
from tpcompile.ir.ops import RMS_NORM, ROPE
from tpcompile.ir.ops.decode.norm_linear import SPLIT
from tpcompile.ir.ops.rotary import rope
from tpcompile.ir.ops.shape import FLATTEN, UNFLATTEN
from tpcompile.lazy import cached_property
from tpcompile.vm.groups import kv
from tpcompile.vm.groups.arithmetic import rms_norm
from tpcompile.vm.groups.normed import Normed, linear
from tpcompile.vm.program import Format, Role, rules
from tpcompile.vm.program.instruction import NONE, Memory, Probe, Range
from tpcompile.vm.program.meaning import Result, Values


class Part(IntEnum):
    """Queries, keys or values. Keys and values are the sides 0 and 1 of the cache."""

    K = 0
    V = 1
    Q = 2


def stored(mode: str, heads: str) -> rules.Chosen:
    """Return the rule of the buffer that stores heads; in the cache, each sequence's new token."""
    queries = rules.scratch("normed.batch", "heads*width")
    queries = queries.accessed(rules.Access(mode, (":", f"{heads}*width"), 2))
    side = rules.cache("heads", "normed.batch")
    side = side.accessed(rules.Access(mode, ("layer", "part", ":", heads, "1"), 2))
    return rules.Chosen("part", {Part.Q: queries, Part.K: side, Part.V: side})


_Q, _V = ("part", Part.Q), ("part", Part.V)
_COS = rules.sole(Role.COS, "longest", "rotated", dtype="float").reads(turn=1, unless=_V)
_SIN = rules.sole(Role.SIN, "longest", "rotated", dtype="float").reads(turn=1, unless=_V)
_POSITIONS = rules.sole(Role.POSITIONS, "normed.batch").reads(unless=_V)
_LENGTHS = rules.sole(Role.LENGTHS, "normed.batch").reads(turn=2, unless=_Q)
_TABLES = rules.sole(Role.TABLES, "normed.batch", "most_blocks").reads(turn=2, unless=_Q)
_LAST = "all_heads*width - heads*width"
_ALONE = "heads*width - all_heads*width"
"""Without other rows in the weight 0, else negative."""
_FIRST_ROWS = {
    Part.Q: rules.Number(0, _LAST, exactly=("0",)),
    Part.K: rules.Number(0, _LAST, exactly=("all_heads*width - 2*heads*width", _ALONE)),
    Part.V: rules.Number(0, exactly=(_LAST,)),
}
"""The weight has the rows of Q, then K, then V, or those of one part; K and V have equally many
heads."""


@dataclass(frozen=True)
class QkvOperands:
    """The queries, keys or values of a rank. Their rows begin at `first_row` of the weight."""

    rank: Annotated[int, rules.RANK]
    layer: Annotated[int, rules.Number(0, "layers - 1")]
    part: Part
    normed: Normed
    weight: Annotated[int, rules.weight("all_heads*width", "normed.width").reads("weight_rows")]
    bias: Annotated[int, rules.maybe(rules.weight("all_heads*width").reads("weight_rows"))]
    first_row: Annotated[int, rules.Chosen("part", _FIRST_ROWS)]
    head_norm: Annotated[int, rules.maybe(rules.weight("width").reads())]
    head_eps: Annotated[float, rules.Real(0.0)]
    cos: Annotated[int, _COS]
    sin: Annotated[int, _SIN]
    longest: Annotated[int, rules.COUNT]
    rotated: Annotated[int, rules.Number(1, "width")]
    """The elements of a head that are rotated, which are the first ones."""
    interleaved: bool
    positions: Annotated[int, _POSITIONS]
    lengths: Annotated[int, _LENGTHS]
    tables: Annotated[int, _TABLES]
    most_blocks: Annotated[int, rules.COUNT]
    block: Annotated[int, rules.Number(1, fits=rules.cache("kv_heads", "normed.batch"))]
    width: Annotated[int, rules.COUNT]
    """The width of a head."""
    out: int
    """The buffer of the queries, or the cache."""
    format: Annotated[Format, rules.FormatOf("weight")]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.normed.batch

    @property
    def first_head(self) -> int:
        """The index of the first head among the heads in the weight."""
        return self.first_row // self.width

    @cached_property
    def finishing(self) -> tuple[float, ...]:
        """The operands that `finish` uses. The stored region identifies layer, part and `out`."""
        places = self.positions, self.lengths, self.tables, self.block
        norm = self.head_norm, self.head_eps, self.normed.zero_centered
        return (*norm, self.cos, self.sin, self.rotated, self.interleaved, *places)

    def elements(self, heads: Range) -> Range:
        return Range(heads.start * self.width, heads.stop * self.width)

    def project(self, memory: Memory, rows: Range, probe: Probe) -> torch.Tensor:
        """Apply these rows of the linear to the normed residual."""
        x = self.normed.value(memory, probe, "norm")
        values = linear(memory, x, self.weight, self.bias, rows)
        columns = Range(rows.start - self.first_row, rows.stop - self.first_row)
        probe(self.part.name.lower(), Range(0, len(x)), columns, values)
        return values

    def finish(self, memory: Memory, heads: Range, rows: torch.Tensor, probe: Probe) -> None:
        """Norm, rotate and store whole heads."""
        columns, batch = self.elements(heads), Range(0, len(rows))
        values = rows.reshape(len(rows), heads.extent, self.width)
        name = self.part.name.lower()
        if self.head_norm != NONE:
            zero_centered = self.normed.zero_centered
            values = rms_norm(values, memory[self.head_norm], self.head_eps, zero_centered)
            probe(f"{name}_normed", batch, columns, values.flatten(1))
        if self.part != Part.V:
            places = memory[self.positions].long()
            tables = memory[self.cos][places], memory[self.sin][places]
            values = rope(values, *tables, interleaved=self.interleaved)
        if self.part == Part.K:
            probe("k_rotated", batch, columns, values.flatten(1))
        if self.part == Part.Q:
            memory[self.out][:, columns.slice] = values.flatten(1)
            return
        side = memory[self.out][self.layer, int(self.part)]
        for row, slot in self._slots(memory):
            side[slot, heads.slice] = stored_rows(values[row], side)

    def meaning(self, values: Values) -> Result:
        """Return the heads of the part: in the buffer of queries, or stored in the cache."""
        normed, is_query = self.normed, self.part == Part.Q
        rows, shape = normed.projected(values), values.shape("out")
        extent = shape[1] if is_query else shape[3] * self.width
        remaining = values.shape("weight")[0] - self.first_row - extent
        parts = SPLIT(rows, [self.first_row, extent, remaining], 1)
        heads = UNFLATTEN(parts[1], 1, [-1, self.width])
        norm = values["head_norm"]
        if norm is not None:
            heads = RMS_NORM(heads, norm, self.head_eps, normed.zero_centered)
        if self.part != Part.V:
            cos, sin = (values.call("rows", values[n], values["positions"]) for n in ("cos", "sin"))
            heads = ROPE(heads, cos, sin, self.interleaved)
        if is_query:
            return Result("out", FLATTEN(heads, 1, 2))
        return Result("out", kv.stored(values, heads, self.block), kv.side(self.layer, self.part))

    def report(self, memory: Memory, heads: Range, probe: Probe) -> None:
        """Send the stored queries of some heads to a probe. The others are in the cache."""
        if self.part == Part.Q:
            columns = self.elements(heads)
            queries = memory[self.out][:, columns.slice]
            probe("q_rotated", Range(0, len(queries)), columns, queries)

    def _slots(self, memory: Memory) -> Iterator[tuple[int, int]]:
        """Yield each sequence that has a new token, with the slot of this token."""
        for row, length in enumerate(memory[self.lengths].tolist()):
            if length:
                held, place = divmod(length - 1, self.block)
                yield row, int(memory[self.tables][row, held]) * self.block + place
