"""Ranks in this process that run decode steps by a program and prompts by modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tpcompile.backends.memory import StepMemory, rotation_of
from tpcompile.backends.reference import Machine
from tpcompile.runtime.programs import StepPrograms
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.rank import OneFront, Ranks, Step


class MachineRanks(OneFront):
    """Ranks that run a step with one new token per sequence on the reference machine.

    Modules run all other steps. Both share each rank's weights and KV cache, so they may alternate.
    """

    def __init__(
        self,
        modules: Ranks,
        programs: StepPrograms,
        rotary: Callable[[], nn.Module],
    ) -> None:
        assert isinstance(modules, InProcessRanks), "the machine reads the caches of all ranks"
        self._modules, self._programs, self._rotary = modules, programs, rotary()
        self._machines: dict[int, Machine] = {}

    def run(self, step: Step) -> torch.Tensor:
        """Run a step; return its result, which is the same on every rank."""
        return self.run_all(step)[0]

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """Run a step; return the result of every rank. The machine has one result for all."""
        if not decodes(step):
            return self._modules.run_all(step)
        caches = self._modules.caches_for(step)
        machine = self._machine(len(step.inputs["lengths"]), caches)
        tables, positions = step.inputs["tables"], step.inputs["positions"]
        machine.place(step.inputs["input_ids"], step.inputs["lengths"], tables, positions)
        tokens = machine.run()[0].long()
        return [tokens if step.output == "tokens" else machine.logits] * len(caches)

    def _machine(self, batch: int, caches: list[torch.Tensor]) -> Machine:
        if batch not in self._machines:
            program = self._programs.for_batch(batch).program
            rotation = rotation_of(program, self._rotary)
            memory = StepMemory(program, self.parameter, rotation, caches)
            self._machines[batch] = Machine(memory)
        machine = self._machines[batch]
        machine.memory.use_caches(caches)  # new tensors if they have grown
        return machine

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's local parameter."""
        return self._modules.parameter(rank, name)

    @property
    def processes(self) -> list[int]:
        """The id of this process, once per rank."""
        return self._modules.processes

    def close(self) -> None:
        """Free the memory."""
        for machine in self._machines.values():
            machine.close()
        self._machines = {}
        self._modules.close()

    @property
    def closed(self) -> str:
        """Why the ranks cannot run; empty while they can."""
        return self._modules.closed


def decodes(step: Step) -> bool:
    """Return whether each sequence has one new token, and all their logits are requested."""
    rows, starts = step.inputs["logit_rows"], step.inputs["starts"]
    each = torch.arange(len(starts))
    keeps = "tables" in step.inputs and len(rows) > 0
    return keeps and torch.equal(starts, each) and torch.equal(rows, each[:-1])
