"""Time on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(device: torch.device, work: Callable[[], object]) -> float:
    """Return the time of some work, from an idle device to an idle device."""
    finish(device)
    started = time.perf_counter()
    work()
    finish(device)
    return (time.perf_counter() - started) * 1000
