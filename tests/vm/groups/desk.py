"""Buffers for one instruction: numbers that no other test shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.vm.program.instruction import Range, StepInstruction

SHOWN = tuple[str, Range, Range, torch.Tensor]
"""What an instruction shows a probe."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return found.to(dtype)


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What nobody has written yet."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -7, dtype=dtype)


def whole_numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Desk:
    """The memory of a machine."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    shown: list[SHOWN] = field(default_factory=list)

    def put(self, tensor: torch.Tensor | None) -> int:
        """The number of its buffer; of what is missing, -1."""
        if tensor is None:
            return -1
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def run(self, instructions: Sequence[StepInstruction]) -> None:
        for instruction in instructions:
            instruction.run(self.tensors, self._show)

    def _show(self, name: str, sequences: Range, columns: Range, values: torch.Tensor) -> None:
        assert values.shape == (sequences.extent, columns.extent), name
        self.shown.append((name, sequences, columns, values.clone()))

    def seen(self, name: str, batch: int, columns: int) -> torch.Tensor:
        """All that was shown by this name, put together."""
        found = unknown(batch, columns)
        for other, rows, places, values in self.shown:
            if other == name:
                found[rows.slice, places.slice] = values.float()
        return found


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-6) -> bool:
    """fp32 sums of the same numbers in another order."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= limit * expected.double().abs().max())


def cuts(extent: int, *edges: int) -> list[Range]:
    """An axis cut at these edges."""
    stops = [*edges, extent]
    return [Range(a, b) for a, b in zip([0, *edges], stops, strict=True)]
