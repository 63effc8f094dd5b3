"""The choice of ranks for a model: in this process, in workers, or in a launcher's group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tpcompile.cores import threads_of
from tpcompile.errors import UnsupportedError
from tpcompile.ir.pieces import Read
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.memory import returned_at_once
from tpcompile.runtime.progress import loading_bar
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.joined import JoinedRanks
from tpcompile.runtime.ranks.protocols import ModuleRanks
from tpcompile.runtime.ranks.rank import RankModule
from tpcompile.runtime.ranks.spawned import SpawnedRanks
from tpcompile.runtime.weights import opened

Load = Callable[
    [Sequence[RankModule], CheckpointFiles | Read, Callable[[], nn.Module]], ModuleRanks
]


@contextmanager
def starting(
    tp: int,
    group: Any | None,
    device: torch.device,
    *,
    inside: bool,
    timeout: float,
    threads: int | None = None,
) -> Iterator[Load]:
    """Start the ranks, and yield a function that loads a model; the ranks end if the body raises.

    Without a group they run in workers, or `inside` this process. Workers take seconds to start, so
    enter this before the model is captured. Torch has `threads` threads on each rank, by default
    an equal share of the cores.
    """
    if group is not None:
        yield _joined(group, device, timeout, threads_of(tp, threads))
    elif inside:
        yield _in_process(device, threads)
    elif device.type != "cpu":
        raise UnsupportedError(
            f"Without a launcher, tp={tp} ranks must be on the CPU",
            got=str(device),
            hint=f"Each GPU needs a process: torchrun --nproc-per-node {tp} SCRIPT",
        )
    else:
        ranks = SpawnedRanks(tp, threads=threads, timeout=timeout)
        try:
            yield _spawned(ranks)
        except BaseException:
            ranks.close()
            raise


def _in_process(device: torch.device, threads: int | None) -> Load:
    def load(modules: Any, weights: Any, rotary: Any) -> ModuleRanks:
        with opened(weights) as read, loading_bar() as loaded, returned_at_once():
            return InProcessRanks(modules, read, rotary, device, loaded, threads)

    return load


def _joined(group: Any, device: torch.device, timeout: float, threads: int) -> Load:
    def load(modules: Any, weights: Any, rotary: Any) -> ModuleRanks:
        with loading_bar(shown=group.rank() == 0) as loaded, returned_at_once():
            return JoinedRanks(modules, weights, rotary, group, device, loaded, timeout, threads)

    return load


def _spawned(ranks: SpawnedRanks) -> Load:
    def load(modules: Any, weights: Any, rotary: Any) -> ModuleRanks:
        with loading_bar() as loaded:
            ranks.load(modules, weights, rotary, loaded)
        return ranks

    return load
