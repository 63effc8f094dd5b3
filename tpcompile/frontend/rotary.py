"""The model's own rotary tables, as the module that graphs call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class RotaryTables(nn.Module):
    """`(positions, width, dtype)` to cos and sin, by Hugging Face's own module.

    Some rope types keep state from call to call, so each rank has its own copy. The module is
    made when it is first called: a graph that is only looked at needs none.
    """

    def __init__(self, source: nn.Module, config: Any) -> None:
        super().__init__()
        frequencies: Any = source.inv_freq
        kept = source if frequencies.is_meta else copy.deepcopy(source)
        self._source = (kept,)  # in a tuple it is no submodule, so it is not moved or saved
        self._config = config
        self._own: Any = None

    def forward(
        self, positions: torch.Tensor, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._own is None:
            self._own = self._make().to(positions.device)
        like = torch.empty(0, dtype=dtype, device=positions.device)
        batch = positions if positions.dim() == 2 else positions.unsqueeze(0)
        cos, sin = self._own(like, batch)
        if cos.shape[-1] != width:
            raise ValueError(f"rotary tables of width {cos.shape[-1]}, the graph expects {width}")
        shape = (*positions.shape, width)
        return cos.reshape(shape), sin.reshape(shape)

    def fresh(self) -> RotaryTables:
        """One for another rank."""
        return RotaryTables(self._source[0], self._config)

    def _make(self) -> nn.Module:
        source: Any = self._source[0]
        if source.inv_freq.is_meta:
            made: nn.Module = type(source)(config=self._config)
            return made
        return copy.deepcopy(self._source[0])
