"""Ranks that a launcher started: this process is one of them, under torchrun or the like."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from tpcompile.comm import ProcessGroupRank
from tpcompile.errors import RankError, UsageError
from tpcompile.ir.pieces import Read
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.ranks.owner import Owner, check_open
from tpcompile.runtime.ranks.rank import Rank, RankModule, Step
from tpcompile.runtime.ranks.worker import evaluate_all, failure
from tpcompile.runtime.weights import opened

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's own `env://` reads; torchrun sets it."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def find_group(
    tp: int | None,
    device: torch.device,
    *,
    meeting: float = 60.0,
    timeout: datetime.timedelta = dist.default_pg_timeout,
) -> Any | None:
    """The process group that this process belongs to, if something has started several ranks.

    That is an initialised default group, or what torchrun has said; it must be of `tp` ranks.
    They must meet within `meeting` seconds; `timeout` is how long one may later wait for
    another. `cuda` without a number becomes the GPU of this process.
    """
    if not dist.is_initialized():
        if not all(name in os.environ for name in _TORCHRUN):
            return None
        _initialise(tp, device, meeting, timeout)
    _check_size(dist.get_world_size(), tp)
    if device.type == "cuda" and device.index is None:
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    group = dist.group.WORLD
    assert group is not None
    _check_owner(group)
    try:
        group._get_backend(device)
    except RuntimeError:  # a group of the user's, for another kind of device
        return dist.new_group(backend=_backend(device), timeout=timeout)
    return group


_OWNERS: weakref.WeakKeyDictionary[Any, Owner] = weakref.WeakKeyDictionary()
"""The process in which each group was first found."""


def _check_owner(group: Any) -> None:
    """Refuse a group that a fork has inherited: the other ranks would never answer it."""
    owner = _OWNERS.setdefault(group, Owner(owned="The process group"))
    if not owner.here:
        raise UsageError(owner.refusal, hint="Compile in the processes that the launcher started")


class JoinedRanks:
    """This process's rank of a model; every process calls the same methods in the same order."""

    def __init__(
        self,
        modules: Sequence[RankModule],
        weights: CheckpointFiles | Read,
        rotary: Callable[[], nn.Module],
        group: Any,
        device: torch.device,
        loaded: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._closed = ""
        self._device = device
        self._owner = Owner()
        self._group = ProcessGroupRank(group)
        weakref.finalize(self, _rest, self._owner, self._group)
        os.register_at_fork(after_in_child=partial(_keep, weakref.ref(group)))
        self._tp = len(modules)
        self._front: int = group.rank()
        module = modules[self._front]
        count = 0

        def one_more() -> None:
            nonlocal count
            count += 1
            loaded(count, len(module.parameters))

        with opened(weights) as read:
            own = evaluate_all(module, read, one_more, device)
        self._rank: Rank | None = Rank(module, own, rotary(), self._group, device)

    @property
    def closed(self) -> str:
        """Why nothing can be run any more; empty while it can."""
        return self._owner.refusal or self._closed

    def run(self, step: Step) -> torch.Tensor:
        """The result of a step, the same on every rank."""
        with self._working() as rank:
            self._check_alike(step)
            return rank.run(step)

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """The result of every rank, given to every rank."""
        with self._working() as rank:
            self._check_alike(step)
            own = rank.run(step)
            results: list[torch.Tensor | None] = [None] * self._tp
            results[rank.module.rank] = own
            return [
                self._group.broadcast(result, root, self._device)
                for root, result in enumerate(results)
            ]

    def _check_alike(self, step: Step) -> None:
        """Each process calls the model by itself; with other tokens the sums would mean nothing."""
        own = _digest(step).to(self._device)
        every = self._group.all_gather(own[None], 0, [1] * self._tp)
        other = (every != every[:1]).any(1).nonzero()
        if len(other):
            raise UsageError(
                "The processes call the model with different arguments",
                got=f"rank {int(other[0])} gives other tokens than rank 0",
                expected="the same prompts in the same order in every process",
            )

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """A parameter as that rank holds it; given to every rank."""
        with self._working() as own:
            mine = own.parameter(name) if own.module.rank == rank else None
            return self._group.broadcast(mine, rank, self._device)

    def agree(self) -> None:
        """Give every rank the random state of rank 0, so that all sample the same tokens."""
        with self._working():
            torch.set_rng_state(self._same(torch.get_rng_state()).cpu())
            if self._device.type == "cuda":
                state = self._same(torch.cuda.get_rng_state(self._device))
                torch.cuda.set_rng_state(state.cpu(), self._device)

    def same(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, on every rank."""
        with self._working():
            return self._same(x)

    def _same(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.broadcast(x, 0, self._device)

    @property
    def front(self) -> int:
        """Every process is a rank, and calls the model."""
        return self._front

    @property
    def fronts(self) -> int:
        """As many as there are ranks."""
        return self._tp

    @property
    def processes(self) -> list[int]:
        """This process; those of the other ranks may be on other hosts."""
        return [self._owner.pid]

    def close(self) -> None:
        """Give the memory back. The process group stays: others may use it."""
        self._closed = self._closed or "The model is closed"
        self._rank = None

    @contextmanager
    def _working(self) -> Iterator[Rank]:
        """Whatever goes wrong closes this rank, for it is out of step with the others."""
        check_open(self.closed)
        assert self._rank is not None
        try:
            yield self._rank
        except (KeyboardInterrupt, SystemExit) as error:
            self._closed = f"The model is closed: a call ended with {type(error).__name__}"
            self._rank = None
            raise
        except Exception as error:
            told = failure(self._rank.module.rank, error).error
            self._closed = f"The model is closed: {told.message[:1].lower()}{told.message[1:]}"
            self._rank = None
            raise told from error


def _digest(step: Step) -> torch.Tensor:
    """Two whole numbers that differ where what goes into a step does."""
    found = hashlib.blake2b(digest_size=16)
    found.update(repr((step.output, step.blocks, list(step.copies))).encode())
    for name, value in step.inputs.items():
        found.update(f"{name} {tuple(value.shape)}".encode())
        found.update(memoryview(value.contiguous().numpy()))  # type: ignore[arg-type]
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.long)


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
            f"The ranks could not meet at {where}",
            where=f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
            got=str(error).split("\n")[0],
            hint="The host must be reachable from all ranks and its port free: give torchrun "
            "another --master-port, or --rdzv-endpoint HOST:PORT for several hosts",
        ) from error
    atexit.register(_leave, Owner())


def _rest(owner: Owner, group: ProcessGroupRank) -> None:
    """Run when ranks are dropped, and before Python ends."""
    if owner.here:
        group.rest()


def _leave(owner: Owner) -> None:
    if owner.here and dist.is_initialized():
        dist.destroy_process_group()


def _keep(group: weakref.ref[Any]) -> None:
    """In a fork, never destroy the group: that waits for threads that the fork does not have."""
    kept = group()
    if kept is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _check_size(size: int, tp: int | None) -> None:
    if tp is not None and size != tp:
        raise UsageError(
            f"tp={tp} was asked for, and {size} processes were started",
            expected="one process for each rank",
            hint=f"Start them with torchrun --nproc-per-node {tp}, or compile with tp={size}",
        )


def _backend(device: torch.device) -> str:
    if device.type not in _BACKENDS:
        raise UsageError(f"There are no ranks on {device}", expected=" or ".join(_BACKENDS))
    return _BACKENDS[device.type]
