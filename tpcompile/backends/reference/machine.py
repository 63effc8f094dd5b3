"""The reference machine: an executor that interprets a program instruction by instruction."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.reference.orders import Order
from tpcompile.vm.program.instruction import Probe, unseen


@executor
class Machine(Executor):
    """An executor that runs one instruction at a time, in any order that the caller chooses."""

    name: ClassVar[str] = "reference"
    in_formats: ClassVar[bool] = True
    kv_in_formats: ClassVar[bool] = True

    def launch(self, steps: int, order: Order | None = None) -> int:
        """Interpret up to `steps` steps. The default order is `StepMemory.turns`."""
        memory, done = self.memory, 0
        while done < steps and not memory.finished:
            memory.forget()
            with torch.inference_mode():
                for number in memory.turns() if order is None else order(memory.program):
                    self.execute(number, unseen)
            done += 1
        return done

    def execute(self, number: int, probe: Probe) -> None:
        """Run one instruction."""
        instruction: Any = self.memory.program.instructions[number]
        instruction.run(self.memory.tensors, probe)
