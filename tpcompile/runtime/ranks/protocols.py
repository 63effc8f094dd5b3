"""Protocols of executors that run steps on all ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from tpcompile.backends.executor import OnTokens
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode


class Ranks(Protocol):
    """An executor of steps on all ranks: in this process, in workers, or in a process group."""

    def run(self, step: Step) -> torch.Tensor:
        """Run a step; return its result, which is the same on every rank."""
        ...

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """Run a step; return the result of every rank. They must be equal bit for bit."""
        ...

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's local parameter."""
        ...

    def agree(self) -> None:
        """Make all fronts (processes that call the model) draw the same random numbers."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the `tensor` of the first front on every front."""
        ...

    @property
    def front(self) -> int:
        """The index of this process among those that call the model; the first writes files."""
        ...

    @property
    def fronts(self) -> int:
        """The number of processes that call the model."""
        ...

    def close(self) -> None:
        """End the ranks and free their memory."""
        ...

    @property
    def processes(self) -> list[int]:
        """The ids of the ranks' processes, by rank, as far as this process knows them."""
        ...

    @property
    def closed(self) -> str:
        """The reason why the ranks cannot run; empty while they can."""
        ...


class ModuleRanks(Ranks, Protocol):
    """Ranks that run modules, and programs that share the modules' weights and KV caches."""

    def check_programs(self) -> None:
        """Raise if the ranks cannot run programs because they share no memory."""
        ...

    def load_program(self, code: StepCode) -> None:
        """Load a program on every rank, which then runs steps of its size."""
        ...

    def run_program(
        self, size: ProgramSize, step: Step, on_tokens: OnTokens | None = None
    ) -> torch.Tensor:
        """Run steps by the program of this size: see `StepExecutors.run`."""
        ...

    def times(self, size: ProgramSize) -> torch.Tensor:
        """Return the times of the last timed step of this program, on all ranks."""
        ...


class OneFront:
    """The part of `Ranks` that is trivial if a single process calls the model."""

    def agree(self) -> None:
        """Do nothing: there is no other front to agree with."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`: this is the first front."""
        return tensor

    def check_programs(self) -> None:
        """Do nothing: this process or its workers can always share memory."""

    @property
    def front(self) -> int:
        """The index of the only front."""
        return 0

    @property
    def fronts(self) -> int:
        return 1


class RanksOf:
    """The part of `Ranks` that another executor of the same ranks implements."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        return self._ranks.parameter(rank, name)

    def agree(self) -> None:
        self._ranks.agree()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._ranks.broadcast(tensor)

    @property
    def front(self) -> int:
        return self._ranks.front

    @property
    def fronts(self) -> int:
        return self._ranks.fronts

    @property
    def processes(self) -> list[int]:
        return self._ranks.processes

    def close(self) -> None:
        self._ranks.close()

    @property
    def closed(self) -> str:
        return self._ranks.closed
