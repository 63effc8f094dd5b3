"""Buffers for a single instruction under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.vm.program.instruction import Range, StepInstruction

SHOWN = tuple[str, Range, Range, torch.Tensor]
"""What an instruction reports to a probe: name, sequences, columns, values."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return unwritten memory."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -7, dtype=dtype)


def whole_numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Desk:
    """The buffers of a machine, and the values reported to its probe."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    shown: list[SHOWN] = field(default_factory=list)

    def put(self, tensor: torch.Tensor | None) -> int:
        """Add a buffer and return its number, or -1 if the tensor is None."""
        if tensor is None:
            return -1
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def run(self, instructions: Sequence[StepInstruction]) -> None:
        for instruction in instructions:
            instruction.run(self.tensors, self._show)
            instruction.report(self.tensors, self._show)

    def _show(self, name: str, sequences: Range, columns: Range, values: torch.Tensor) -> None:
        assert values.shape == (sequences.extent, columns.extent), name
        self.shown.append((name, sequences, columns, values.clone()))

    def seen(self, name: str, batch: int, columns: int) -> torch.Tensor:
        """Reassemble all values reported under this name."""
        whole = unknown(batch, columns)
        for other, rows, places, values in self.shown:
            if other == name:
                whole[rows.slice, places.slice] = values.float()
        return whole


def near(actual: torch.Tensor, expected: torch.Tensor, limit: float = 2e-6) -> bool:
    """Return whether two results agree up to the order of fp32 sums."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max()
    return bool(error <= limit * expected.double().abs().max())


def cuts(extent: int, *edges: int) -> list[Range]:
    """Return an axis cut at these edges."""
    stops = [*edges, extent]
    return [Range(a, b) for a, b in zip([0, *edges], stops, strict=True)]
