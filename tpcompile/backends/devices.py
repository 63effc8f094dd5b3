"""Devices: the fastest executor on each, and the target that describes it."""

from __future__ import annotations

import torch

from tpcompile.backends.executor import Executor
from tpcompile.backends.native.executor import Native
from tpcompile.backends.triton.executor import Triton
from tpcompile.backends.triton.gpu import target_on
from tpcompile.vm.targets import Target, target_of

FASTEST: dict[str, type[Executor]] = {"cpu": Native, "cuda": Triton}
"""The executor that is fastest, by type of device: what `backend="auto"` selects."""


def this_device() -> torch.device:
    """Return the device of this machine that runs models fastest: its first GPU, or its CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def machine_of(device: torch.device, ranks: int = 1, threads: int | None = None) -> Target:
    """Return the target that describes a device. All ranks share its cores or SMs.

    On a CPU each rank has `threads` workers, by default an equal share of the cores.
    """
    if device.type == "cuda":
        return target_on(device, ranks)
    return target_of("cpu", threads, ranks)
