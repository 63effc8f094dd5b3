"""Weights in formats of several components, for linears and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.format import Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.ops.embedding import EMBEDDINGS, local_rows
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.spec import SPECS
from tpcompile.ir.quantize import rounded


@dataclass(frozen=True)
class RoundingWeight:
    """A weight of a linear that rounds its input to int8, or a stack of them.

    Ops take it instead of a tensor. Values in fp32 are multiplied, and the result is rounded once,
    to the dtype of the input.
    """

    values: torch.Tensor
    """The exact values, in fp32."""
    format: Format
    first: int
    """The first column, among those of the whole weight."""
    dtype: torch.dtype
    """The dtype of the model, to which embeddings round the values."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the linear."""
        wide = None if bias is None else bias.float()
        out = functional.linear(rounded(x, self.format, self.first), self.values, wide)
        return out.to(x.dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> RoundingWeight:
        return replace(self, values=self.values[place])

    @classmethod
    def __torch_function__(
        cls, target: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a linear, an embedding, or the body of an op that contains one."""
        bound = SPECS[target].bind(args, kwargs or {})
        if target is LINEAR:
            return bound["weight"].linear(bound["input"], bound["bias"])
        if target in EMBEDDINGS:
            table = bound["weight"]
            return SPECS[target].reference(**{**bound, "weight": table.values}).to(table.dtype)
        return SPECS[target].reference(**bound)


@dataclass(frozen=True)
class DecodedExperts:
    """The weights of experts for linears; each is decoded when it is read.

    A backend with linears that decode weights has a subclass.
    """

    word: str
    parts: Sequence[torch.Tensor]
    columns: Interval
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, place: int) -> Any:
        parts = [part[place] for part in self.parts]
        return decoded(self.word, parts, self.columns, self.dtype)


def decoded(
    word: str, parts: Sequence[torch.Tensor], columns: Interval, dtype: torch.dtype
) -> torch.Tensor | RoundingWeight:
    """Return a weight for linears from its components, given the name of its format.

    The rows consist of these columns of the whole weight.
    """
    stored = Format.parsed(word)
    named = _named(stored, parts)
    if stored.rounds:
        values = stored.decoded(named, columns, torch.float32)
        return RoundingWeight(values, stored, columns[0], dtype)
    return stored.decoded(named, columns, dtype)


def decoded_rows(
    word: str,
    parts: Sequence[torch.Tensor],
    columns: Interval,
    dtype: torch.dtype,
    ids: torch.Tensor,
    first_row: int = 0,
) -> torch.Tensor:
    """Compute `vocab_embedding` of a table in a format; only the rows of the ids are decoded."""
    stored = Format.parsed(word)
    rows, inside = local_rows(ids, first_row, len(parts[0]))
    named = _named(stored, [part[rows] for part in parts])
    return stored.decoded(named, columns, dtype).where(inside.unsqueeze(-1), 0)


def _named(stored: Format, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the components of a weight by suffix."""
    return {
        component.suffix: part for component, part in zip(stored.components, parts, strict=True)
    }
