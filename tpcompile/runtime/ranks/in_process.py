"""Ranks in this process: the only one, or all of them as threads, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from tpcompile.backends.torch_tp import run_together
from tpcompile.comm import SimulatedGroup
from tpcompile.ir.pieces import Read
from tpcompile.runtime.ranks.owner import Owner, check_open
from tpcompile.runtime.ranks.rank import OneFront, Rank, RankModule, Step, make_parameter


class InProcessRanks(OneFront):
    """All ranks of a model, each with its own module and KV cache."""

    def __init__(
        self,
        modules: Sequence[RankModule],
        read: Read,
        rotary: Callable[[], nn.Module],
        device: torch.device,
        loaded: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._owner = Owner()  # the threads of torch, and a held lock, would stop a fork for ever
        self._group = SimulatedGroup(len(modules))
        weights: list[dict[str, torch.Tensor]] = [{} for _ in modules]
        names = list(modules[0].parameters)
        for number, name in enumerate(names):  # one by one, so that a tensor is read once for all
            for module, own in zip(modules, weights, strict=True):
                own[name] = make_parameter(module, name, read, device)
            loaded(number + 1, len(names))
        self._ranks = [
            Rank(module, own, rotary(), self._group.rank(module.rank), device)
            for module, own in zip(modules, weights, strict=True)
        ]

    def run(self, step: Step) -> torch.Tensor:
        """The result, the same on every rank."""
        return self.run_all(step)[0]

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """The result of every rank."""
        check_open(self.closed)
        return run_together([partial(rank.run, step) for rank in self._ranks], self._group)

    def caches_for(self, step: Step) -> list[torch.Tensor]:
        """Each rank's KV cache, with the room that a step needs and its blocks copied."""
        check_open(self.closed)
        return [rank.cache_for(step) for rank in self._ranks]

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """A parameter as a rank holds it."""
        check_open(self.closed)
        return self._ranks[rank].parameter(name)

    @property
    def processes(self) -> list[int]:
        """This process, for every rank."""
        return [self._owner.pid] * len(self._ranks)

    def close(self) -> None:
        """Give the memory back."""
        self._ranks = []

    @property
    def closed(self) -> str:
        """Why nothing can be run any more; empty while it can."""
        return self._owner.refusal or ("" if self._ranks else "The model is closed")
