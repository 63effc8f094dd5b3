"""Memory in huge pages: in small ones, looking up addresses limits how fast a CPU reads."""

from __future__ import annotations

import math
import mmap

import torch


def zeros(size: int) -> mmap.mmap:
    """Return private memory that is zero, in huge pages if the system has them."""
    # Shared memory, mmap's default, would not be in huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            return memory
    return memory


def allocated(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory that steps read; on the CPU it is zero, and in huge pages.

    Pages are faulted in at once, so that steps do not wait for them, and allocation fails early.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = torch.frombuffer(zeros(size), dtype=torch.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory.view(dtype).view(shape)
