"""Memory that the processes of a launcher share. The system frees it when they end."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any, NamedTuple

import torch

from tpcompile.comm import ProcessGroupRank
from tpcompile.errors import UnsupportedError
from tpcompile.runtime.ranks.descriptors import allocated_file

_PREFIX = "tpcompile-step-"


class Mapped(NamedTuple):
    """Memory that all ranks have mapped, or the ranks without it."""

    memory: Any
    lost: list[int]
    error: str = ""
    """On rank 0, why the memory could not be allocated."""


def shared_memory(group: ProcessGroupRank, rank: int, ranks: int, size: int) -> Any:
    """Return `size` zero bytes that all ranks share; every rank must call this."""
    mapped = map_together(group, rank, ranks, size)
    if mapped.lost:
        raise UnsupportedError(
            "Ranks that run a program must be on one machine, with memory that they share",
            got=mapped.error or f"no access to the memory of rank 0 from ranks {mapped.lost}",
            hint='Compile with backend="torch", which runs on several machines',
        )
    return mapped.memory


def map_together(group: ProcessGroupRank, rank: int, ranks: int, size: int) -> Mapped:
    """Map `size` zero bytes that all ranks share; every rank must call this.

    Rank 0 creates a file in memory, and the others open it through /proc by its descriptor. A
    random number in its name identifies the file.
    """
    token = secrets.randbits(62)
    file, error = -1, ""
    if rank == 0:
        try:
            file = allocated_file(f"{_PREFIX}{token}", size)
        except OSError as failure:
            error = f"no memory on rank 0: {failure.strerror}"
    try:
        place = torch.tensor([os.getpid(), file, token])
        place = group.broadcast(place, 0, torch.device("cpu"))
        if rank > 0:
            file = _open(*place.tolist())
        memory = _map(file, size)
        every = group.all_gather(torch.tensor([memory is not None]), 0, [1] * ranks)
    finally:
        if file >= 0:
            os.close(file)
    lost = [peer for peer, mapped in enumerate(every.tolist()) if not mapped]
    return Mapped(None if lost else memory, lost, error)


def _map(file: int, size: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(file, size) if file >= 0 else None
    except OSError:
        return None


def _open(process: int, file: int, token: int) -> int:
    """Open a file in memory of another process; return -1 if there is no such file."""
    path = f"/proc/{process}/fd/{file}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if f"{_PREFIX}{token}" in os.readlink(f"/proc/self/fd/{descriptor}"):
            return descriptor
        os.close(descriptor)
    except OSError:
        return -1
    return -1
