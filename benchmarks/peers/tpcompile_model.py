"""Models that tpcompile compiled. The ranks are worker processes or, with tp=1, this process."""

from __future__ import annotations

import os

import torch

import tpcompile
from benchmarks.peers.kinds import Loaded, Settings
from benchmarks.peers.torch_decoder import TorchDecoder


def modules(settings: Settings) -> Loaded:
    """Load with torch modules."""
    return _load(settings, "torch")


def native(settings: Settings) -> Loaded:
    """Load with the native executor."""
    return _load(settings, "native")


def _load(settings: Settings, backend: str) -> Loaded:
    torch.set_num_threads(settings.threads)
    model = tpcompile.compile(
        settings.directory, tp=settings.tp, backend=backend, max_batch=settings.largest_batch
    )
    processes = list(model.processes) if settings.tp > 1 else [os.getpid()]
    return Loaded(TorchDecoder(model, lambda: None), processes, close=model.close)
