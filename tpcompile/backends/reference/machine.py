"""The reference machine: an executor that interprets a program instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tpcompile.backends.executor import EXECUTORS, Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference.orders import Order, in_program_order
from tpcompile.vm.program.instruction import Probe, StepInstruction, unseen

Seen = Callable[[StepInstruction], Probe]
"""A function from an instruction to the probe that receives its intermediate values."""


class Machine(Executor):
    """An executor that runs the instructions one after the other, in any order that it is given."""

    name: ClassVar[str] = "reference"

    def __init__(self, memory: StepMemory) -> None:
        super().__init__(memory)
        self.order: Order = in_program_order
        self.seen: Seen = _nothing

    def run(
        self, steps: int = 1, order: Order = in_program_order, seen: Seen | None = None
    ) -> torch.Tensor:
        """Run steps with the instructions in this order; `seen` returns their probes."""
        self.order, self.seen = order, seen or _nothing
        return super().run(steps)

    def launch(self, steps: int) -> int:
        done = 0
        while done < steps and not self.memory.finished:
            self._step()
            done += 1
        return done

    def _step(self) -> None:
        memory = self.memory
        memory.forget()
        with torch.inference_mode():
            for number in self.order(memory.program):
                instruction: Any = memory.program.instructions[number]
                instruction.run(memory.tensors, self.seen(instruction))


def _nothing(instruction: StepInstruction) -> Probe:
    return unseen


EXECUTORS.add(Machine.name, Machine)
