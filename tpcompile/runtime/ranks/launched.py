"""The process group of ranks that a launcher such as torchrun has started."""

from __future__ import annotations

import atexit
import datetime
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tpcompile.comm import ProcessGroupRank
from tpcompile.cores import threads_of
from tpcompile.errors import RankError, UsageError
from tpcompile.runtime.ranks.owner import Owner

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torch's `env://` reads; torchrun sets them."""
_LOCAL_SIZE = "LOCAL_WORLD_SIZE"
"""The variable that torchrun sets to the number of its processes on this machine."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def launched_rank() -> int:
    """Return the rank that torchrun gives to this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if has_launcher() else 0


def has_launcher() -> bool:
    """Return whether torchrun, or a launcher like it, started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def find_group(
    tp: int | None,
    device: torch.device,
    *,
    meeting: float = 60.0,
    timeout: datetime.timedelta = dist.default_pg_timeout,
) -> Any | None:
    """Return this process's group of ranks, or None if no launcher started several ranks.

    It is the default group if that is initialised, else one made from torchrun's variables; it
    must have `tp` ranks. The ranks must connect within `meeting` seconds; `timeout` limits later
    collectives. For `cuda` without an index, select the GPU of this process.
    """
    if not dist.is_initialized():
        if not has_launcher():
            return None
        _initialise(tp, device, meeting, timeout)
    _check_size(dist.get_world_size(), tp)
    if device.type == "cuda" and device.index is None:
        torch.cuda.set_device(_own_gpu())
    group = dist.group.WORLD
    assert group is not None
    _check_owner(group)
    try:
        group._get_backend(device)
    except RuntimeError:  # a group of the user, for another device type
        return dist.new_group(backend=_backend(device), timeout=timeout)
    return group


def agreed_threads(group: Any, device: torch.device) -> int:
    """Return the threads of each rank: the smallest share that any of them has of its cores.

    Every rank must call this. All ranks have the same programs, but not always the same cores.
    """
    ranks = int(os.environ.get(_LOCAL_SIZE, group.size())) if has_launcher() else group.size()
    local_threads = torch.tensor([threads_of(ranks)], device=device)
    every = ProcessGroupRank(group).all_gather(local_threads, 0, [1] * group.size())
    return int(every.min())


def _own_gpu() -> int:
    """Return the index of the GPU of this process, or raise if there are more ranks than GPUs."""
    place, gpus = dist.get_node_local_rank(fallback_rank=0), torch.cuda.device_count()
    if place >= gpus:
        raise UsageError(
            "Each rank needs a GPU of its own",
            got=f"{gpus} GPUs on this machine for rank {place} of its processes",
            hint=f"Start at most {gpus} processes: torchrun --nproc-per-node {gpus}",
        )
    return place


_OWNERS: weakref.WeakKeyDictionary[Any, Owner] = weakref.WeakKeyDictionary()
"""The process that first used each group."""


def _check_owner(group: Any) -> None:
    """Raise for a group that a fork has inherited: the other ranks would never answer it."""
    owner = _OWNERS.setdefault(group, Owner(owned="The process group"))
    if not owner.here:
        raise UsageError(owner.refusal, hint="Compile in the processes that the launcher started")


def _initialise(
    tp: int | None, device: torch.device, meeting: float, timeout: datetime.timedelta
) -> None:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        met = rendezvous("env://", timeout=datetime.timedelta(seconds=meeting))
        store, rank, size = next(met)
        _check_size(size, tp)
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=size, timeout=timeout
        )
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"The ranks could not connect to each other at {where}",
            where=f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
            got="the error: " + str(error).split("\n")[0],
            hint="All ranks must reach the host, and its port must be free: pass another "
            "--master-port to torchrun, or --rdzv-endpoint HOST:PORT for several hosts",
        ) from error
    atexit.register(_leave, Owner())


def _leave(owner: Owner) -> None:
    if owner.here and dist.is_initialized():
        dist.destroy_process_group()


def _check_size(size: int, tp: int | None) -> None:
    if tp is not None and size != tp:
        raise UsageError(
            f"The number of processes must be tp={tp}",
            got=str(size),
            expected="one process per rank",
            hint=f"Start them with torchrun --nproc-per-node {tp}, or compile with tp={size}",
        )


def _backend(device: torch.device) -> str:
    if device.type not in _BACKENDS:
        raise UsageError(f"Ranks on {device} are not supported", expected=" or ".join(_BACKENDS))
    return _BACKENDS[device.type]
