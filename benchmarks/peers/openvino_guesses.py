"""OpenVINO GenAI, with and without its look-up of n-grams in the text."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.kinds import NGRAM, Guessed, Loaded, Settings
from benchmarks.peers.openvino_model import exported, precision_of


def load(settings: Settings) -> Loaded:
    """Export the checkpoint if no side has done so."""
    return Loaded(PipelineGuesser(settings), [os.getpid()])


class PipelineGuesser:
    """A pipeline with look-up, and one without."""

    def __init__(self, settings: Settings) -> None:
        precision = precision_of(settings)
        self._directory = str(exported(settings))
        self._properties = {
            "INFERENCE_NUM_THREADS": settings.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        self._pipelines: dict[bool, Any] = {}

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""
        looks_up = most > 0
        if looks_up not in self._pipelines:
            options = {"prompt_lookup": True} if looks_up else {}
            self._pipelines[looks_up] = openvino_genai.LLMPipeline(
                self._directory, "CPU", scheduler_config=_scheduler(), **options, **self._properties
            )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        if looks_up:
            config.num_assistant_tokens, config.max_ngram_size = most, NGRAM
        clock = _Clock()
        ids = openvino.Tensor(np.array([list(prompt)], np.int64))
        self._pipelines[looks_up].generate(ids, config, clock)
        return clock.tokens, clock.times, clock.steps


def _scheduler() -> Any:
    config = openvino_genai.SchedulerConfig()
    config.max_num_seqs, config.cache_size = 1, 2
    config.enable_prefix_caching = False
    return config


class _Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
    """A streamer that records when each token comes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.steps = -1

    def write(self, token: int | list[int]) -> Any:
        """Record the tokens of a step."""
        new = [token] if isinstance(token, int) else list(token)
        self.tokens += new
        self.times += [time.monotonic()] * len(new)
        self.steps += 1
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing: all tokens have come."""
