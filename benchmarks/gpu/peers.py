"""The peers: Hugging Face's model, eager and compiled by Inductor with CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from benchmarks.gpu.clock import elapsed_ms
from benchmarks.gpu.kernels import Shape
from tpcompile.runtime.cache_name import CACHE

_BURSTS = 16
"""The bursts for which a static cache has room, because it cannot go back."""


class Eager:
    """The unchanged model with a growing cache."""

    name = "eager"

    def __init__(self, shape: Shape, model: Any) -> None:
        self._shape, self._model = shape, model
        self._cache = DynamicCache(config=model.config)
        _fill(model, self._cache, shape)
        self.burst()

    def burst(self) -> float:
        """Run the steps; return the milliseconds per step."""
        milliseconds = elapsed_ms(self._model.device, self._run) / self._shape.steps
        self._cache.crop(-self._shape.steps)
        return milliseconds

    def close(self) -> None:
        """Release the cache."""
        self._cache = None

    def _run(self) -> None:
        token = torch.zeros(self._shape.batch, 1, dtype=torch.long, device=self._model.device)
        with torch.inference_mode():
            for _ in range(self._shape.steps):
                token = self._step(self._model, token)

    def _step(self, model: Any, token: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=token, use_cache=True, logits_to_keep=1, **{CACHE: self._cache})
        return output.logits[:, -1].argmax(-1, keepdim=True)


class Compiled(Eager):
    """The same model compiled with `mode="max-autotune"`, which captures CUDA graphs.

    Its cache is static, and cannot go back: each burst continues after the one before.
    """

    name = "torch.compile"

    def __init__(self, shape: Shape, model: Any) -> None:
        self._shape, self._model, self._left = shape, model, _BURSTS
        torch._dynamo.reset()
        self._compiled = torch.compile(model, mode="max-autotune", dynamic=False)
        length = shape.context + (1 + _BURSTS) * shape.steps
        self._cache = StaticCache(config=model.config, max_cache_len=length)
        _fill(model, self._cache, shape)
        self.burst()

    def burst(self) -> float:
        """Run the steps; return the milliseconds per step."""
        if not self._left:
            raise RuntimeError(f"The static cache has no room for another of {_BURSTS} bursts")
        self._left -= 1
        return elapsed_ms(self._model.device, self._run) / self._shape.steps

    def _step(self, model: Any, token: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return super()._step(self._compiled, token).clone()


def _fill(model: Any, cache: Any, shape: Shape) -> None:
    """Run prompts of random tokens, one less than the context."""
    if shape.context == 1:
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, model.config.vocab_size, (shape.batch, shape.context - 1), generator=generator
    )
    with torch.inference_mode():
        model(
            input_ids=ids.to(model.device),
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
        )
