"""Pass `greedy-head`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import ALL_GATHER, ARGMAX, REDISTRIBUTE
from tpcompile.ir.types import ValueType
from tpcompile.rewriting.rewrite import Report, calls, insert
from tpcompile.rewriting.structure import output_of


@dataclass(frozen=True)
class GreedyHead:
    """Add a second output for greedy decoding: the best token of each row.

    %l = linear(%x, %w)                   %l = linear(%x, %w)        Shard(1, vocab)
    %g = all_gather(%l, dim=1)      →     %g = all_gather(%l, dim=1)
    return %g                             %t = argmax(%l)
                                          return [%g, %t]

    For `%t`, ranks exchange one value and one id per row, not the logits. A run requests one of
    the two outputs.
    """

    name: ClassVar[str] = "greedy-head"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    adds_results: ClassVar[tuple[Any, ...]] = (ARGMAX,)

    def apply(self, gm: fx.GraphModule) -> Report:
        if calls(gm, ARGMAX):
            return Report()
        output = output_of(gm.graph)
        logits = operand(output)
        kind = value_type(logits)
        if kind.dims != 2:
            raise PassError(
                f"%{logits.name} must have one row per token",
                where=str(origin_of(logits)),
                got=str(kind),
                expected="logits[R, vocabulary]",
                hint="Put greedy-head after canonicalize",
            )
        gathered = logits.target in (ALL_GATHER, REDISTRIBUTE)
        source = operand(logits) if gathered else logits
        if value_type(source).layout_of(-1) is None:  # partial or sharded by rows, not by columns
            source = logits
        with gm.graph.inserting_before(output):
            tokens = insert(source, ARGMAX, source, name="tokens")
        tokens.meta["origin"] = origin_of(logits)
        output.args = ((logits, tokens),)
        info = info_of(gm)
        best = ValueType(kind.shape[:1], torch.long)
        gm.meta["tpcompile"] = replace(info, outputs=(*info.outputs, best))
        return Report(matches=1)
