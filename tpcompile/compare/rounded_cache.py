"""Attention to the keys and values that a rounding KV cache stores, in eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from tpcompile.ir.format import Format
from tpcompile.ir.kv import rounded_values
from tpcompile.ir.ops.attention import attention


def empty_cache(config: Any, stored: Format | None) -> DynamicCache:
    """Return an empty cache for a Hugging Face model, which rounds to a format if there is one."""
    return DynamicCache(config=config) if stored is None else RoundedCache(stored, config)


def rounding_attention(stored: Format) -> Callable[..., torch.Tensor]:
    """Return the function of the op `attention` with rounded keys and values."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any) -> torch.Tensor:
        keys, values = (rounded_values(side.float(), stored) for side in (k, v))
        return attention(q.float(), keys, values, **others).to(q.dtype)

    return attend


class RoundedCache(DynamicCache):
    """A cache of which layers attend to rounded keys and values, those of new tokens included."""

    def __init__(self, stored: Format, config: Any) -> None:
        super().__init__(config=config)
        self._stored = stored

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round new keys and values, and return those of all tokens."""
        keys, values = (
            rounded_values(states, self._stored) for states in (key_states, value_states)
        )
        return super().update(keys, values, *args, **kwargs)
