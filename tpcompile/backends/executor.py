"""Executors, which run the decode steps of programs, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from tpcompile.backends.memory import StepMemory
from tpcompile.registry import Registry
from tpcompile.vm.program.abi import VERSION, check_version

EXECUTORS: Registry[type[Executor]] = Registry("executor")
_Kind = TypeVar("_Kind", bound="type[Executor]")


def executor(kind: _Kind) -> _Kind:
    """Register an executor class; its `name` becomes the name of a backend."""
    EXECUTORS.add(kind.name, kind)
    return kind


class Executor(ABC):
    """An interpreter or a compiled kernel that runs one program in its memory.

    A subclass implements `launch`. The input checks and the results are common to all executors.
    """

    name: ClassVar[str]
    abi: ClassVar[int] = VERSION
    """The version of the binary interface that the executor implements."""

    @classmethod
    def prepare(cls) -> None:
        """Do what is needed once per machine, such as building a library. Raise if it fails."""
        return

    def __init__(self, memory: StepMemory) -> None:
        check_version(self.abi, self.name)
        self.memory = memory

    def place(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor | None = None,
        stops: Sequence[int] = (),
        ended: torch.Tensor | None = None,
    ) -> None:
        """Write the inputs of the next step: see `StepMemory.place`."""
        self.memory.place(tokens, lengths, tables, positions, stops, ended)

    def run(self, steps: int = 1, *options: Any) -> torch.Tensor:
        """Run `steps` steps, fewer if all sequences end; return the tokens, `[steps, batch]`.

        A sequence that has already ended gets -1. `options` are passed to `launch`.
        """
        self.memory.begin(steps)
        return self.memory.tokens(self.launch(steps, *options))

    @abstractmethod
    def launch(self, steps: int, *options: Any) -> int:
        """Run up to `steps` steps and return their number. An executor may have options."""

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, `[batch, vocabulary]`."""
        return self.memory.logits

    def close(self) -> None:
        """Release the memory. No step can be run afterwards."""
        self.memory.tensors.clear()
