"""Ranks in this process: a single one, or all as threads for tests and notebooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from tpcompile.backends.executor import OnTokens
from tpcompile.backends.torch_threads import torch_threads
from tpcompile.backends.torch_tp import run_together
from tpcompile.comm import SimulatedGroup
from tpcompile.cores import threads_of
from tpcompile.ir.pieces import Read
from tpcompile.runtime.progress import Loaded
from tpcompile.runtime.ranks.executors import StepExecutors
from tpcompile.runtime.ranks.owner import Owner, check_open
from tpcompile.runtime.ranks.parameters import Parameters
from tpcompile.runtime.ranks.protocols import OneFront
from tpcompile.runtime.ranks.rank import Rank, RankModule
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode


class InProcessRanks(OneFront):
    """All ranks of a model, each with its own module and KV cache."""

    def __init__(
        self,
        modules: Sequence[RankModule],
        read: Read,
        rotary: Callable[[], nn.Module],
        device: torch.device,
        loaded: Loaded = lambda done, total: None,
        threads: int | None = None,
    ) -> None:
        """Load the ranks. `threads` are those of torch on each rank.

        By default each has an equal share of the cores, and at most the number that the program
        around this model has chosen for torch.
        """
        self._owner = Owner()  # a fork would deadlock on torch's threads or on a held lock
        self._group = SimulatedGroup(len(modules))
        memory = [Parameters(module, device) for module in modules]
        weights: list[dict[str, torch.Tensor]] = [{} for _ in modules]
        names = list(modules[0].parameters)
        for number, name in enumerate(names):  # name by name, so that all ranks share one read
            for parameters, rank_weights in zip(memory, weights, strict=True):
                rank_weights[name] = parameters.evaluate(name, read)
            loaded(number + 1, len(names))
        self._ranks = [
            Rank(module, rank_weights, rotary(), self._group.rank(module.rank), device)
            for module, rank_weights in zip(modules, weights, strict=True)
        ]
        self._executors = StepExecutors()
        self._most_threads, self._threads = threads_of(len(modules)), threads
        self._lock = threading.RLock()
        """Steps of several threads take turns: they use the same memory."""

    def run(self, step: Step) -> torch.Tensor:
        return self.run_all(step)[0]

    def run_all(self, step: Step) -> list[torch.Tensor]:
        threads = self._threads or min(self._most_threads, torch.get_num_threads())
        with self._working(), torch_threads(threads):
            return run_together([partial(rank.run, step) for rank in self._ranks], self._group)

    def load_program(self, code: StepCode) -> None:
        """Load a program. One executor runs it for all ranks."""
        with self._working():
            caches = [rank.cache for rank in self._ranks]
            states = [rank.states for rank in self._ranks]
            self._executors.load(code, self.parameter, caches, states)

    def run_program(
        self, size: ProgramSize, step: Step, on_tokens: OnTokens | None = None
    ) -> torch.Tensor:
        with self._working():
            caches = [rank.cache_for(step) for rank in self._ranks]
            states = [rank.states for rank in self._ranks]
            return self._executors.run(size, step, caches, states, on_tokens)

    def times(self, size: ProgramSize) -> torch.Tensor:
        with self._working():
            return self._executors.times(size)

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        check_open(self.closed)
        return self._ranks[rank].parameter(name)

    @property
    def processes(self) -> list[int]:
        """The id of this process, once per rank."""
        return [self._owner.pid] * len(self._ranks)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Admit one thread at a time, while the ranks are open."""
        check_open(self.closed)  # a fork may have inherited a held lock
        with self._lock:
            check_open(self.closed)  # another thread may have closed them
            yield

    def close(self) -> None:
        """Free the memory, after the step that is running."""
        with self._lock if self._owner.here else nullcontext():
            self._executors.close()
            self._ranks = []

    @property
    def closed(self) -> str:
        return self._owner.refusal or ("" if self._ranks else "The model is closed")
