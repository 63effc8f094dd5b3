"""Decoding with a torch model that is called like Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpcompile.runtime.cache_name import CACHE


class TorchDecoder:
    """A model, and the KV cache of its sequences."""

    def __init__(self, model: Any, new_cache: Callable[[], Any]) -> None:
        self._model = model
        self._new_cache = new_cache
        self._cache: Any = None

    def begin(self, batch: int, length: int) -> None:
        """Drop the old cache. Caches of these models grow, so the size is not needed."""
        self._cache = self._new_cache()

    def step(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to each sequence."""
        return self._call(self._model, rows)

    def numbers(self, logits: torch.Tensor) -> Any:
        """Convert logits to numpy."""
        return logits[:, -1].float().numpy()

    def _call(self, model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor([list(row) for row in rows])
        with torch.inference_mode():
            output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: self._cache})
        self._cache = output[CACHE]
        logits: torch.Tensor = output.logits
        return logits
