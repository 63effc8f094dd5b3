"""Memory that the processes of a launcher share. The system frees it when they end."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Any

import torch

from tpcompile.comm import ProcessGroupRank
from tpcompile.errors import UnsupportedError
from tpcompile.runtime.ranks.descriptors import memory_file

_PREFIX = "tpcompile-step-"


def shared_memory(group: ProcessGroupRank, rank: int, ranks: int, size: int) -> Any:
    """Return `size` zero bytes that all ranks share; every rank must call this.

    Rank 0 creates a file in memory, and the others open it through /proc by its descriptor. A
    random number in its name identifies the file.
    """
    token = secrets.randbits(62)
    own = memory_file(f"{_PREFIX}{token}") if rank == 0 else -1
    try:
        if rank == 0:
            os.truncate(own, size)
        cpu = torch.device("cpu")
        place = group.broadcast(torch.tensor([os.getpid(), own, token]), 0, cpu)
        file = own if rank == 0 else _open(*place.tolist())
        try:
            every = group.all_gather(torch.tensor([file >= 0]), 0, [1] * ranks)
            if not bool(every.all()):
                lost = [one for one, found in enumerate(every.tolist()) if not found]
                raise UnsupportedError(
                    "Ranks that run a program must be on one machine, with memory that they share",
                    got=f"no access to the memory of rank 0 from ranks {lost}",
                    hint='Compile with backend="torch", which runs on several machines',
                )
            return mmap.mmap(file, size)
        finally:
            if file >= 0 and rank > 0:
                os.close(file)
    finally:
        if own >= 0:
            os.close(own)


def _open(process: int, file: int, token: int) -> int:
    """Open a file in memory of another process; return -1 if there is no such file."""
    path = f"/proc/{process}/fd/{file}"
    try:
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if f"{_PREFIX}{token}" in os.readlink(f"/proc/self/fd/{found}"):
            return found
        os.close(found)
    except OSError:
        return -1
    return -1
