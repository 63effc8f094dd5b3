"""A weight of several components in the reference's memory, read like a tensor of its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpcompile.ir.format import Format
from tpcompile.ir.layout import Interval


class Weight:
    """Rows of a weight. An index of rows, or of rows and a slice of columns, gives values in fp32.

    The rows consist of these columns of the whole weight.
    """

    def __init__(
        self, stored: Format, parts: Mapping[str, torch.Tensor], columns: Interval
    ) -> None:
        self.format, self._parts, self._columns = stored, parts, columns
        start, stop = columns
        self.shape = torch.Size((len(parts[stored.values.suffix]), stop - start))

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """The components, by suffix."""
        return self._parts

    @property
    def values(self) -> torch.Tensor:
        """The component that has the values."""
        return self._parts[self.format.values.suffix]

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = columns.indices(self.shape[1])
        first = self._columns[0]
        wanted = first + start, first + stop
        parts = {}
        for part in self.format.components:
            skipped, _ = part.span(first, first + 1)
            low, high = part.span(*wanted)
            parts[part.suffix] = self._parts[part.suffix][rows, low - skipped : high - skipped]
        return self.format.decoded(parts, wanted, torch.float32)

    @property
    def first(self) -> int:
        """The first column, among those of the whole weight."""
        return self._columns[0]
