"""Hugging Face's continuous batching, with a manager that stays between requests."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.kinds import STEP_TOKENS, Continued, Loaded, Settings

_PAGE = 256
"""The tokens of a block: the manager's default."""
_NO_END = -1
"""The token that ends requests: none."""


def load(settings: Settings) -> Loaded:
    """Load the unchanged model, and start its manager."""
    torch.set_num_threads(settings.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.path, dtype="auto", trust_remote_code=False
    ).train(False)
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=_NO_END),
        ContinuousBatchingConfig(
            num_blocks=settings.largest_batch * -(-settings.longest // _PAGE),
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=settings.largest_batch,
        ),
    )
    manager.start()
    return Loaded(ManagerService(manager), [os.getpid()], close=lambda: manager.stop(block=True))


class ManagerService:
    """A manager, which runs in a thread of this process."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Add all requests, and take their tokens as they come."""
        begun = time.perf_counter()
        names: list[str] = [
            self._manager.add_request(
                list(prompt), max_new_tokens=new, streaming=True, eos_token_id=_NO_END
            )
            for prompt in prompts
        ]
        continuations: dict[str, Continued] = {name: ([], []) for name in names}
        left = len(names)
        while left:
            output = self._manager.get_result(timeout=1)
            if output is None:
                error = self._manager.background_thread_status.fatal_error
                if error is not None:
                    raise RuntimeError(f"the manager failed: {error}")
                continue
            tokens, times = continuations[output.request_id]
            times += [time.perf_counter() - begun] * (len(output.generated_tokens) - len(tokens))
            tokens[:] = output.generated_tokens
            left -= output.is_finished()
        return list(continuations.values())
