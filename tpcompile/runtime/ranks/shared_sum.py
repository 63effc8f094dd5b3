"""Shared memory for collectives of ranks on one machine, or a warning that says why not."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tpcompile.comm import LIBRARY, Peer, ProcessGroupRank, SharedExchange, exchange_bytes
from tpcompile.cores import cores
from tpcompile.errors import UnsupportedError
from tpcompile.runtime.ranks.descriptors import after_standard, allocated_file
from tpcompile.runtime.ranks.shared_memory import map_together

_CPU = torch.device("cpu")
_UNLIMITED_S = 24 * 3600.0
"""In effect no timeout: the parent of spawned ranks detects dead and hung ranks."""


class Offer(NamedTuple):
    """The file of the library, and an open file of memory."""

    library: Path
    memory: int


@contextmanager
def offered(ranks: int) -> Iterator[Offer | None]:
    """Yield the offer to ranks that this process starts.

    If the library or the memory is not available, warn once and yield None.
    """
    offer = _offer(ranks) if ranks > 1 else None
    try:
        yield offer
    finally:
        if offer is not None:
            os.close(offer.memory)


def _offer(ranks: int) -> Offer | None:
    try:
        library = LIBRARY.built()
        LIBRARY.load(library)
        return Offer(library, allocated_file("tpcompile-sum", exchange_bytes(ranks)))
    except (UnsupportedError, OSError) as error:
        warn(str(error))
        return None


def attached(
    library: Path, file: int, rank: int, peers: Sequence[Peer], eager: bool
) -> SharedExchange:
    """Attach a rank to the memory that its parent offers; `peers` are the other ranks."""
    ranks = len(peers) + 1
    memory = mmap.mmap(file, exchange_bytes(ranks))
    loaded = LIBRARY.load(library)
    return SharedExchange(
        loaded, memory, rank, ranks, eager=eager, peers=peers, timeout=_UNLIMITED_S
    )


def agreed(group: Any, device: torch.device) -> SharedExchange | None:
    """Return shared memory if all ranks of a process group can have it, else None.

    Every rank must call this. Only ranks on one host, on the CPU, in a gloo group can have it.
    """
    rank, ranks = group.rank(), group.size()
    if device.type != "cpu" or ranks == 1:
        return None
    gloo = group._get_backend(_CPU) if isinstance(group, dist.ProcessGroup) else group
    if not isinstance(gloo, dist.ProcessGroupGloo):
        return None
    through = ProcessGroupRank(group)
    mapped = map_together(through, rank, ranks, exchange_bytes(ranks))
    if mapped.error:
        warn(mapped.error)
    pids = through.all_gather(torch.tensor([os.getpid()]), 0, [1] * ranks).tolist()
    peers, library = None, None
    if not mapped.lost:
        peers = _peers([pid for pid in pids if pid != os.getpid()])
        library = _library()
    fit = torch.tensor([peers is not None and library is not None])
    every = through.all_gather(fit, 0, [1] * ranks)
    if not bool(every.all()):
        return None
    assert peers is not None and library is not None
    return SharedExchange(
        library,
        mapped.memory,
        rank,
        ranks,
        eager=cores() >= ranks,
        peers=peers,
        timeout=gloo.options._timeout.total_seconds(),
    )


class _Process:
    """Another process of this machine; see `Peer`."""

    def __init__(self, pid: int) -> None:
        self._file = after_standard(os.pidfd_open(pid))
        weakref.finalize(self, os.close, self._file)

    def fileno(self) -> int:
        return self._file


def _peers(pids: Sequence[int]) -> list[_Process] | None:
    """Open other processes; return None if the system has no such files."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return [_Process(pid) for pid in pids]
    except OSError:
        return None


def _library() -> ctypes.CDLL | None:
    try:
        return LIBRARY.load()
    except (UnsupportedError, OSError) as error:
        warn(str(error))
        return None


@functools.cache
def warn(reason: str) -> None:
    """Warn that ranks do not sum through shared memory, once per reason."""
    if sys.stderr is not None:
        sys.stderr.write(
            "tpcompile: warning: ranks sum over sockets, which is slower than shared memory. "
            f"{reason}\n"
        )
