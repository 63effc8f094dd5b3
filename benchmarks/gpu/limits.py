"""The bandwidth of a device: a kernel that only reads, and a copy."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu.clock import elapsed_ms

_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_REPEATS = 10
_PROGRAMS_PER_SM = 8


@dataclass(frozen=True)
class Limits:
    """Bandwidths in GB/s. A copy counts the bytes that it reads and those that it writes."""

    read: float
    copy: float


def limits_of(device: torch.device) -> Limits:
    """Measure the bandwidths of a device, in turn."""
    size = _BYTES[device.type]
    source = torch.randint(-9, 9, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    reads, copies = [], []
    for _ in range(_REPEATS):
        reads.append(size / elapsed_ms(device, lambda: read_all(source)))
        copies.append(2 * size / elapsed_ms(device, lambda: target.copy_(source)))
    return Limits(median(reads) / 1e6, median(copies) / 1e6)


def read_all(source: torch.Tensor) -> None:
    """Read every element of an int32 tensor."""
    if source.device.type == "cpu":
        source.view(torch.float32).sum()
        return
    from benchmarks.gpu.reading import BLOCK, read

    programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=source.device)
    read[(programs,)](source, out, source.numel(), BLOCK=BLOCK)
