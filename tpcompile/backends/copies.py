"""Copies of results between two launches of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def columns_joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the columns of matrices on the CPU, on this thread alone.

    `torch.cat` would start torch's threads. They spin for milliseconds after their work, on the
    cores of the workers that run the next step.
    """
    rows, width = len(parts[0]), sum(part.shape[1] for part in parts)
    whole = torch.empty(rows, width, dtype=parts[0].dtype)
    start = 0
    for part in parts:
        columns = whole[:, start : start + part.shape[1]]
        _raw(columns)[:] = _raw(part)  # numpy copies on this thread
        start += part.shape[1]
    return whole


def _raw(x: torch.Tensor) -> Any:
    """Return the bytes of a matrix as an array of numpy, which has no bf16."""
    return x.view(torch.uint8).numpy()
