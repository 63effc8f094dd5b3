"""Ranks started by a launcher such as torchrun: this process is one of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tpcompile.backends.executor import OnTokens
from tpcompile.backends.share import RankShare
from tpcompile.backends.torch_threads import torch_threads
from tpcompile.comm import ProcessGroupRank
from tpcompile.errors import UsageError
from tpcompile.ir.pieces import Read
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.progress import LoadCounter, Loaded
from tpcompile.runtime.ranks.later import Later
from tpcompile.runtime.ranks.owner import Owner, check_open
from tpcompile.runtime.ranks.parameters import evaluate_all
from tpcompile.runtime.ranks.rank import Rank, RankModule
from tpcompile.runtime.ranks.shared_memory import shared_memory
from tpcompile.runtime.ranks.shared_sum import agreed
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode, digest
from tpcompile.runtime.ranks.worker import failure
from tpcompile.runtime.weights import opened
from tpcompile.vm.program import Role

_KEPT_GROUPS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The groups that forks of this process keep alive."""


def _keep_in_forks(group: Any) -> None:
    if group not in _KEPT_GROUPS:
        _KEPT_GROUPS.add(group)
        os.register_at_fork(after_in_child=partial(_keep, weakref.ref(group)))


class JoinedRanks:
    """This process's rank of a model; all processes must make the same calls in the same order."""

    def __init__(
        self,
        modules: Sequence[RankModule],
        weights: CheckpointFiles | Read,
        rotary: Callable[[], nn.Module],
        group: Any,
        device: torch.device,
        loaded: Loaded = lambda done, total: None,
        timeout: float = 60.0,
        threads: int = 1,
    ) -> None:
        self._closed = ""
        self._device = device
        self._owner = Owner()
        self._group = ProcessGroupRank(group, agreed(group, device))
        weakref.finalize(self, _wait_for_threads, self._owner, self._group)
        _keep_in_forks(group)
        self._tp = len(modules)
        self._timeout, self._threads = timeout, threads
        self._columns: dict[ProgramSize, list[int]] = {}
        """The columns of the logits on each rank, by the size of a program."""
        self._front: int = group.rank()
        module = modules[self._front]
        counter = LoadCounter(loaded, len(module.parameters))
        with opened(weights) as read:
            local_weights = evaluate_all(module, read, counter.add, device)
        self._rank: Rank | None = Rank(module, local_weights, rotary(), self._group, device)

    @property
    def closed(self) -> str:
        return self._owner.refusal or self._closed

    def run(self, step: Step) -> torch.Tensor:
        with self._working() as rank:
            return self._run(rank, step)

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """Run a step; return the results of all ranks, on every rank."""
        with self._working() as rank:
            local_result = self._run(rank, step)
            results: list[torch.Tensor | None] = [None] * self._tp
            results[rank.module.rank] = local_result
            return [
                self._group.broadcast(result, root, self._device)
                for root, result in enumerate(results)
            ]

    def _run(self, rank: Rank, step: Step) -> torch.Tensor:
        self._check_alike(step)
        with torch_threads(self._threads):
            return rank.run(step)

    def check_programs(self) -> None:
        """Raise unless all processes can share memory. All of them must call this."""
        check_open(self.closed)
        shared_memory(self._group, self._front, self._tp, mmap.PAGESIZE).close()

    def load_program(self, code: StepCode) -> None:
        """Load a program, with memory that the processes share. They must be on one machine."""
        with self._working() as rank:
            memory = shared_memory(self._group, self._front, self._tp, code.memory)
            share = RankShare(code.program, self._front, memory, self._timeout, self._group.lost)
            rank.load_program(code, share)
            buffers = code.program.one_per_rank(Role.LOGITS)
            self._columns[code.size] = [code.program.buffers[buffer].shape[1] for buffer in buffers]

    def run_program(
        self, size: ProgramSize, step: Step, on_tokens: OnTokens | None = None
    ) -> torch.Tensor:
        """Run steps by the program of this size; return the result of all ranks."""
        with Later(on_tokens) as later, self._working() as rank:
            self._check_alike(step)
            local_result = rank.run_program(size, step, later.callback)
            if step.output == "tokens":
                return local_result
            return self._group.all_gather(local_result, 1, self._columns[size])

    def times(self, size: ProgramSize) -> torch.Tensor:
        """Return the times of the last timed step of this program, on every rank."""
        with self._working() as rank:
            return self._group.all_gather(rank.times(size)[None], 0, [1] * self._tp).sum(0)

    def _check_alike(self, step: Step) -> None:
        """Raise if the processes pass different steps: their sums would mix different inputs."""
        local_digest = digest(step).to(self._device)
        every = self._group.all_gather(local_digest[None], 0, [1] * self._tp)
        other = (every != every[:1]).any(1).nonzero()
        if len(other):
            raise UsageError(
                "Every process must call the model with the same arguments",
                got=f"different inputs on rank {int(other[0])} and rank 0",
                expected="the same prompts in the same order in every process",
            )

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """Return that rank's local parameter, on every rank."""
        with self._working() as local:
            value = local.parameter(name) if local.module.rank == rank else None
            return self._group.broadcast(value, rank, self._device)

    def agree(self) -> None:
        """Copy the random state of rank 0 to every rank, so that all sample the same tokens."""
        with self._working():
            torch.set_rng_state(self._broadcast(torch.get_rng_state()).cpu())
            if self._device.type == "cuda":
                state = self._broadcast(torch.cuda.get_rng_state(self._device))
                torch.cuda.set_rng_state(state.cpu(), self._device)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `tensor` on every rank."""
        with self._working():
            return self._broadcast(tensor)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.broadcast(tensor, 0, self._device)

    @property
    def front(self) -> int:
        """The index of this process, which is its rank."""
        return self._front

    @property
    def fronts(self) -> int:
        """The number of processes that call the model: one per rank."""
        return self._tp

    @property
    def processes(self) -> list[int]:
        """The id of this process only: the other ranks may be on other hosts."""
        return [self._owner.pid]

    def close(self) -> None:
        """Free the memory. The process group stays open for other users."""
        self._closed = self._closed or "The model is closed"
        self._rank = None

    @contextmanager
    def _working(self) -> Iterator[Rank]:
        """Yield the rank; any error closes it, because it is then out of step with the others."""
        check_open(self.closed)
        assert self._rank is not None
        try:
            yield self._rank
        except (KeyboardInterrupt, SystemExit) as error:
            self._closed = f"The model is closed: a call raised {type(error).__name__}"
            self._rank = None
            raise
        except Exception as error:
            rank_error = failure(self._rank.module.rank, error).error
            self._closed = (
                f"The model is closed: {rank_error.message[:1].lower()}{rank_error.message[1:]}"
            )
            self._rank = None
            raise rank_error from error


def _wait_for_threads(owner: Owner, group: ProcessGroupRank) -> None:
    """Wait for the group's threads when the ranks are deleted, and before Python exits."""
    if owner.here:
        group.wait_for_release()


def _keep(group: weakref.ref[Any]) -> None:
    """Keep the group alive in a fork: destroying it waits for threads that a fork does not have."""
    process_group = group()
    if process_group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
