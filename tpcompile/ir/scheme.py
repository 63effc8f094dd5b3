"""Schemes: the formats that the weights of a model are quantized to while they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpcompile.ir.format import Format, Kind


@dataclass(frozen=True)
class Integers:
    """Integers with a scale per group of columns, or per row if `columns` is 0."""

    kind: Kind
    columns: int

    @property
    def bits(self) -> int:
        """The bits of an integer."""
        return 4 if self.kind == Kind.INT4 else 8

    def format(self, scales: torch.dtype) -> Format:
        """Return the format with scales in this dtype."""
        return Format.grouped(self.kind, scales, self.columns)

    def divides(self, columns: int) -> bool:
        """Return whether a row of `columns` columns consists of whole groups."""
        return not self.columns or columns % self.columns == 0


@dataclass(frozen=True)
class Scheme:
    """The integers for the linears of the layers and for the head."""

    layers: Integers
    head: Integers | None
    """None for a head that is not quantized. It stays tied to the embedding if it is."""
