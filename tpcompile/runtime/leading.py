"""Steps that one process decides. Under a launcher, the other processes run them too."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import UsageError
from tpcompile.runtime.open_calls import OpenCalls
from tpcompile.runtime.ranks.owner import check_open
from tpcompile.runtime.ranks.protocols import Ranks
from tpcompile.runtime.ranks.step import Step

_STAY = "stay"
"""A no-op message."""


@dataclass(frozen=True)
class _Released:
    """A message that releases following processes."""

    result: Any


class Leading:
    """Mixin of a compiled model whose steps the first process decides, and all processes run.

    In a plain script only one process calls the model, and these methods send nothing.
    """

    _ranks: Ranks
    _steps: int
    _open_calls: OpenCalls

    @property
    def fronts(self) -> int:
        """The number of processes that call the model: several under a launcher."""
        return self._ranks.fronts

    @property
    def leads(self) -> bool:
        """Whether this process is the first of those that call the model."""
        return self._ranks.front == 0

    def run_step(self, step: Step) -> torch.Tensor:
        """Run a step of sequences whose blocks the caller manages: see `reserve`.

        Under a launcher only the first process calls it, and the others `follow`.
        """
        with self._open_calls.enter():
            check_open(self._ranks.closed)
            self._steps += 1
            self._shared(step)
            return self._ranks.run(step)

    def follow(self) -> Any:
        """Run the steps of the first process until it releases the others; return its result.

        Under a launcher, call this in all other processes while the first one runs an engine.
        """
        if self.leads:
            raise UsageError(
                "The first process leads, it cannot follow",
                hint="Call follow only where model.leads is false, under a launcher",
            )
        with self._open_calls.enter():
            while not isinstance(message := self._shared(None), _Released):
                if isinstance(message, Step):
                    self._steps += 1
                    self._ranks.run(message)
        return message.result

    def keep_followers(self) -> None:
        """Signal to the following processes that this one is alive. Raise if one of them is not."""
        self._shared(_STAY)

    def release_followers(self, result: Any = None) -> None:
        """Release the following processes, which then continue with their programs."""
        if not self._ranks.closed:
            self._shared(_Released(result))

    def _shared(self, value: Any) -> Any:
        """Return the value of the first process in every process."""
        if self.fronts == 1:
            return value
        payload = pickle.dumps(value) if self.leads else b"\0"
        received = self._ranks.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return value if self.leads else pickle.loads(received.cpu().numpy().tobytes())
