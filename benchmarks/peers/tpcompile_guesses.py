"""tpcompile's engine, with and without guesses from the text."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

import tpcompile
from benchmarks.peers.kinds import Guessed, Loaded, Settings


def load(settings: Settings) -> Loaded:
    """Load with the default backend, and two engines in this process."""
    torch.set_num_threads(settings.threads)
    model = tpcompile.compile(
        settings.directory,
        max_batch=1,
        max_seq_len=settings.longest,
        weights=settings.weights or None,
    )
    return Loaded(EngineGuesser(model, settings.longest), [os.getpid()], close=model.close)


class EngineGuesser:
    """A model with an engine per number of guesses."""

    def __init__(self, model: tpcompile.CompiledModel, longest: int) -> None:
        self._model, self._longest = model, longest
        self._engines: dict[int, tpcompile.Engine] = {}

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""
        if most not in self._engines:
            self._engines[most] = tpcompile.Engine(
                self._model,
                max_batch=1,
                kv_tokens=self._longest,
                speculate=f"prompt:{most}" if most else None,
            )
        engine = self._engines[most]
        params = tpcompile.SamplingParams(max_tokens=new, ignore_eos=True)
        tokens, times, before = [], [], engine.steps
        for event in engine.add(list(prompt), params, salt=time.monotonic()):
            if event.chosen is not None:
                tokens.append(event.chosen.token)
                times.append(time.monotonic())
                before = engine.steps if len(tokens) == 1 else before
        return tokens, times, engine.steps - before
