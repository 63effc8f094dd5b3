"""The tables of a model's rotary embedding: cosines and sines of every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpcompile.errors import UnsupportedError
from tpcompile.vm.program import Program, Role

CPU = torch.device("cpu")
_POSITIONS_AT_ONCE = 2048
"""The positions whose rotation is computed at a time: the intermediate values are fp32."""
Rotation = tuple[torch.Tensor, torch.Tensor]
"""The cosines and sines of every position, `[positions, width]`."""


def rotation_of(
    program: Program, rotary: Callable[..., Any], device: torch.device = CPU
) -> Rotation:
    """Compute the rotation of every position on `device`.

    Raise if it depends on the sequence length.
    """
    buffer = program.buffers[program.one_per_rank(Role.COS)[0]]
    longest, width = buffer.shape
    cos, sin = (torch.empty(longest, width, dtype=buffer.dtype, device=device) for _ in range(2))
    for first in range(0, longest, _POSITIONS_AT_ONCE):
        places = torch.arange(first, min(first + _POSITIONS_AT_ONCE, longest))
        # Some rope types choose frequencies by the longest position, so it is in each call.
        positions = torch.cat([places, torch.tensor([longest - 1])]).to(device)
        parts = rotary(positions, width, buffer.dtype)
        for table, part in zip((cos, sin), parts, strict=True):
            table[first : first + len(places)] = part[:-1]
    alone = rotary(torch.zeros(1, dtype=torch.long, device=device), width, buffer.dtype)
    if not all(map(torch.equal, alone, (cos[:1], sin[:1]))):
        raise UnsupportedError(
            "The rotation tables of the model depend on the sequence length",
            expected="the same tables for every length up to max_seq_len",
            hint="Choose a max_seq_len below the length at which its rope type changes",
        )
    return cos, sin
