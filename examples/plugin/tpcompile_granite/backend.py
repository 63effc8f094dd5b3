"""A toy backend: it runs a program from its int32 words alone, as a kernel would."""

from typing import ClassVar

import torch

from tpcompile.backends.executor import Executor, executor
from tpcompile.backends.memory import StepMemory
from tpcompile.vm.program.encoding import encode_program
from tpcompile.vm.program.instruction import Probe, unseen
from tpcompile.vm.program.instruction_set import decode


@executor
class WordMachine(Executor):
    """An executor that decodes and runs one row of words after another."""

    name: ClassVar[str] = "words"

    def __init__(self, memory: StepMemory) -> None:
        super().__init__(memory)
        self._rows = encode_program(memory.program).words.tolist()

    def launch(self, steps: int) -> int:
        """Run up to `steps` steps in sequential order. Wait only for ranks in other processes."""
        done = 0
        while done < steps and not self.memory.finished:
            self.memory.forget()
            with torch.inference_mode():
                for number in self.memory.turns():
                    self.execute(number, unseen)
            done += 1
        return done

    def execute(self, number: int, probe: Probe) -> None:
        """Decode and run one row."""
        decode(self._rows[number]).run(self.memory.tensors, probe)
