"""Checks that a GPU can run a program, and its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpcompile.backends.triton.options import LEAST_CAPABILITY
from tpcompile.errors import UnsupportedError
from tpcompile.vm.program import Program
from tpcompile.vm.targets import TARGETS, Target

_LIKE = "h100"
"""The target whose constants an unknown GPU gets."""


def check_gpu(program: Program, gpu: Any) -> None:
    """Raise unless all workers of a program can run on a GPU at the same time.

    `gpu` is the result of `torch.cuda.get_device_properties`. A worker takes a whole SM.
    """
    if (gpu.major, gpu.minor) < LEAST_CAPABILITY:
        raise UnsupportedError(
            "The triton backend needs a newer GPU",
            got=f"{gpu.name} with compute capability {gpu.major}.{gpu.minor}",
            expected=f"{'.'.join(map(str, LEAST_CAPABILITY))} or newer",
            hint='Compile with backend="torch"',
        )
    workers = len(program.queues) * program.sharing
    if workers > gpu.multi_processor_count:
        raise UnsupportedError(
            "All workers must run at the same time, one on each SM of the GPU",
            got=f"{workers} workers in all",
            expected=f"at most {gpu.multi_processor_count}, the SMs of {gpu.name}",
            hint="Choose a target with fewer workers, or omit the target",
        )


def check_shared(needed: int, gpu: Any) -> None:
    """Raise unless an SM has the shared memory that a worker of the compiled kernel needs."""
    most = gpu.shared_memory_per_block_optin
    if needed > most:
        raise UnsupportedError(
            "The kernel needs more shared memory than an SM of the GPU has",
            got=f"{needed:,} bytes for {gpu.name}",
            expected=f"at most {most:,} bytes",
            hint='Compile with dtype="bfloat16", or with backend="torch"',
        )


def target_on(device: torch.device, ranks: int) -> Target:
    """Return the target of a GPU that `ranks` ranks share."""
    return target_like(torch.cuda.get_device_properties(device), ranks)


def target_like(gpu: Any, ranks: int) -> Target:
    """Return the target with the name of a GPU, or one like it; ranks share the SMs."""
    words = gpu.name.lower().replace("-", " ").split()
    known = next((name for name in TARGETS if name in words), None)
    target = TARGETS[known or _LIKE]
    workers = max(1, gpu.multi_processor_count // ranks)
    return replace(target, name=known or "cuda", workers=workers)
