"""Models that tpcompile compiled. The ranks are worker processes or, with tp=1, this process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import tpcompile
from benchmarks.peers.kinds import Continued, Loaded, Settings
from benchmarks.peers.torch_decoder import TorchDecoder


def modules(settings: Settings) -> Loaded:
    """Load with torch modules."""
    return _load(settings, "torch")


def native(settings: Settings) -> Loaded:
    """Load with the native executor."""
    return _load(settings, "native")


def engine(settings: Settings) -> Loaded:
    """Load with the default backend, and an engine in this process."""
    torch.set_num_threads(settings.threads)
    model = tpcompile.compile(
        settings.directory,
        tp=settings.tp,
        max_batch=settings.largest_batch,
        max_seq_len=settings.longest,
    )
    made = tpcompile.Engine(model).start()
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]

    def close() -> None:
        made.close()
        model.close()

    return Loaded(EngineService(made), processes, close=close)


class EngineService:
    """An engine that runs in a thread. Each request has another one, as in a server."""

    def __init__(self, engine: tpcompile.Engine) -> None:
        self._engine = engine

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Add all requests, and take their tokens as they come."""
        params = tpcompile.SamplingParams(max_tokens=new, ignore_eos=True)
        begun = time.perf_counter()
        handles = [self._engine.add(list(prompt), params) for prompt in prompts]
        with ThreadPoolExecutor(len(handles)) as pool:
            return list(pool.map(lambda handle: self._follow(handle, begun), handles))

    def _follow(self, handle: Any, begun: float) -> Continued:
        tokens, times = [], []
        for event in handle:
            if event.chosen is not None:
                tokens.append(event.chosen.token)
                times.append(time.perf_counter() - begun)
        return tokens, times


def _load(settings: Settings, backend: str) -> Loaded:
    torch.set_num_threads(settings.threads)
    model = tpcompile.compile(
        settings.directory, tp=settings.tp, backend=backend, max_batch=settings.largest_batch
    )
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]
    return Loaded(TorchDecoder(model, lambda: None), processes, close=model.close)
