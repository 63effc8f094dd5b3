"""OpenVINO GenAI's continuous batching."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.kinds import STEP_TOKENS, Continued, Loaded, Settings
from benchmarks.peers.openvino_model import exported, precision_of


def load(settings: Settings) -> Loaded:
    """Export the checkpoint if no side has done so, and compile it with a paged cache."""
    directory = exported(settings)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = settings.largest_batch
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.cache_size = 4
    scheduler.enable_prefix_caching = True
    precision = precision_of(settings)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(directory),
        scheduler,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": settings.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        },
    )
    return Loaded(PipelineService(pipeline), [os.getpid()])


class PipelineService:
    """A pipeline whose steps this process runs."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline, self._number = pipeline, 0

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Add all requests, and take their tokens as they come."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        begun = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([list(prompt)], np.int64))
            handles.append(self._pipeline.add_request(self._number, ids, config))
            self._number += 1
        continuations: list[Continued] = [([], []) for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - begun
            for handle, (tokens, times) in zip(handles, continuations, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
                        times += [now] * len(output.generated_ids)
        return continuations
