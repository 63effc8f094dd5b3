"""llama.cpp by llama-cpp-python, with and without its look-up of n-grams in the text."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.gguf_file import shared_gguf
from benchmarks.peers.kinds import NGRAM, Guessed, Loaded, Settings
from benchmarks.peers.llama import GRANULE, quantized_gguf


def load(settings: Settings) -> Loaded:
    """Load a GGUF file; write that of the checkpoint if no side has written it yet."""
    path = shared_gguf(settings.path)
    if settings.integers:
        path = quantized_gguf(path, settings.integers, settings.threads)
    return Loaded(LlamaGuesser(str(path), settings), [os.getpid()])


class LlamaGuesser:
    """A model per number of guesses, since llama-cpp-python computes other logits with them."""

    def __init__(self, path: str, settings: Settings) -> None:
        self._path, self._settings = path, settings
        self._models: dict[int, Any] = {}

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""
        if most not in self._models:
            self._models[most] = Counting(self._path, self._settings, most)
        model = self._models[most]
        model.reset()
        tokens, times = [], []
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            tokens.append(int(token))
            times.append(time.monotonic())
            if len(tokens) == 1:
                model.steps = 0
            if len(tokens) == new:
                break
        return tokens, times, model.steps


class Counting(llama_cpp.Llama):  # type: ignore[misc]
    """A model that counts its steps."""

    def __init__(self, path: str, settings: Settings, most: int) -> None:
        self.steps = 0
        draft = LlamaPromptLookupDecoding(max_ngram_size=NGRAM, num_pred_tokens=most)
        super().__init__(
            path,
            n_ctx=-(-settings.longest // GRANULE) * GRANULE,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            draft_model=draft if most else None,
            # With a draft it keeps all logits, but otherwise has memory for those of a batch only.
            logits_all=most > 0,
            verbose=False,
        )

    def eval(self, tokens: Sequence[int]) -> None:
        """Count a step, and run it."""
        self.steps += 1
        super().eval(tokens)
