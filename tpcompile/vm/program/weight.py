"""A weight of several components in the reference's memory, read like a tensor of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpcompile.ir.format import Format


class Weight:
    """Rows of a weight. An index of rows, or of rows and a slice of columns, gives values in fp32.

    The columns begin with column `first` of the whole weight.
    """

    def __init__(
        self,
        stored: Format,
        values: torch.Tensor,
        others: Mapping[str, torch.Tensor],
        first: int = 0,
    ) -> None:
        self._stored, self._values, self._others, self._first = stored, values, others, first
        self.shape = values.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = columns.indices(self.shape[1])
        parts = {"": self._values[rows, start:stop]}
        for part in self._stored.components[1:]:
            skipped, _ = part.span(self._first, self._first + 1)
            low, high = part.span(self._first + start, self._first + stop)
            parts[part.suffix] = self._others[part.suffix][rows, low - skipped : high - skipped]
        return self._stored.decoded(parts, self._first + start, torch.float32)
