"""The reference machine: an executor that interprets a program instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.reference.orders import Order
from tpcompile.vm.program.instruction import Probe, StepInstruction, unseen

Seen = Callable[[StepInstruction], Probe]
"""A function from an instruction to the probe that receives its intermediate values."""


@executor
class Machine(Executor):
    """An executor that runs one instruction at a time, in any order that the caller chooses."""

    name: ClassVar[str] = "reference"

    def launch(
        self,
        steps: int,
        order: Order | None = None,
        seen: Seen = lambda instruction: unseen,
    ) -> int:
        """Interpret up to `steps` steps; `seen` returns the probe of each instruction.

        The default order is `StepMemory.turns`.
        """
        done = 0
        while done < steps and not self.memory.finished:
            self._step(order, seen)
            done += 1
        return done

    def _step(self, order: Order | None, seen: Seen) -> None:
        memory = self.memory
        memory.forget()
        turns = memory.turns() if order is None else order(memory.program)
        with torch.inference_mode():
            for number in turns:
                instruction: Any = memory.program.instructions[number]
                instruction.run(memory.tensors, seen(instruction))
