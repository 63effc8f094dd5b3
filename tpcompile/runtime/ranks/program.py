"""Ranks that run decode steps by a program, and all other steps by modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tpcompile.backends.executor import EXECUTORS, OnTokens
from tpcompile.backends.rotation import CPU, rotation_of
from tpcompile.errors import UsageError
from tpcompile.inspect.step_trace import StepTrace
from tpcompile.runtime.programs import StepPrograms
from tpcompile.runtime.ranks.owner import check_open
from tpcompile.runtime.ranks.rank import ModuleRanks
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode, size_for

log = logging.getLogger(__name__)


class ProgramRanks:
    """Ranks that run a step with one new token per sequence, or with rows, by a program.

    Modules run all other steps. Both share each rank's weights and KV cache, so they may alternate.
    """

    def __init__(
        self,
        modules: ModuleRanks,
        programs: StepPrograms,
        rotary: Callable[[], nn.Module],
        executor: str,
        device: torch.device = CPU,
    ) -> None:
        self.programs, self.executor, self._device = programs, executor, device
        self._modules, self._rotary = modules, rotary()
        self._loaded: set[ProgramSize] = set()
        self.timed = False
        """Whether programs record the times of instructions."""
        self._torch_idle = False
        """Whether the last step returned tokens, after which torch's threads have no work."""
        self._last_timed: tuple[ProgramSize, int] | None = None
        """The size of the program of the last timed step, and the mean tokens per sequence."""

    def run(self, step: Step) -> torch.Tensor:
        """Run a step; return its result, which is the same on every rank."""
        if not decodes(step):
            log.debug("modules: a step of %d tokens", len(step.inputs["input_ids"]))
            self._torch_idle = False
            return self._modules.run(step)
        found = self.launch(step)
        return found[0] if step.output == "tokens" else found

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """Run a step; return the result of every rank. A program has one result for all."""
        if not decodes(step):
            self._torch_idle = False
            return self._modules.run_all(step)
        return [self.run(step)] * self.programs.ranks

    def launch(self, step: Step, each: OnTokens | None = None) -> torch.Tensor:
        """Run steps by a program; return their tokens, `[steps, sequences]`, or the last logits.

        `each` receives the tokens of each step as they come.
        """
        check_open(self.closed)
        step = in_rows(step)
        batch = size_for(len(step.inputs["lengths"]))
        size = ProgramSize(batch, batch if step.rows else 1)
        if size not in self._loaded:
            program = self.programs.of_size(size).program
            rotation = rotation_of(program, self._rotary, self._device)
            self._modules.load_program(StepCode(program, size, rotation, self.executor))
            self._loaded.add(size)
        asked = replace(step, timed=True) if self.timed else step
        wait = partial(self._modules.run_program, size, asked, each)
        found = wait() if self._torch_idle else EXECUTORS[self.executor].during(wait)
        self._torch_idle = step.output == "tokens"
        steps = len(found) if step.output == "tokens" else 1
        log.debug("program: %d steps of %d sequences", steps, len(step.inputs["lengths"]))
        self.programs.steps += steps
        if self.timed:
            tokens = float(step.inputs["lengths"].float().mean())
            self._last_timed = size, round(tokens) + steps - 1
        return found

    def trace(self) -> StepTrace:
        """Return the last timed step beside its simulation."""
        if self._last_timed is None:
            raise UsageError(
                "No step was timed",
                hint="Call model.time_steps() first. Programs run and time the steps with one new "
                "token per sequence",
            )
        size, context = self._last_timed
        return self.programs.trace(size, context, self._modules.times(size))

    @property
    def can_time(self) -> bool:
        """Whether the executor records the times of instructions."""
        return EXECUTORS[self.executor].takes_times

    def most_steps(self, stops: int) -> int:
        """Return the maximum number of steps per launch if so many tokens end a sequence."""
        return self.programs.most_steps if stops <= self.programs.most_stops else 1

    def parameter(self, rank: int, name: str) -> torch.Tensor:
        """Return a rank's local parameter."""
        return self._modules.parameter(rank, name)

    def agree(self) -> None:
        """Make all fronts draw the same random numbers."""
        self._modules.agree()

    def same(self, x: torch.Tensor) -> torch.Tensor:
        """Return the `x` of the first front on every front."""
        return self._modules.same(x)

    @property
    def front(self) -> int:
        """The index of this process among those that call the model."""
        return self._modules.front

    @property
    def fronts(self) -> int:
        """The number of processes that call the model."""
        return self._modules.fronts

    @property
    def processes(self) -> list[int]:
        """The ids of the ranks' processes, by rank."""
        return self._modules.processes

    def close(self) -> None:
        """End the ranks and free their memory."""
        self._modules.close()

    @property
    def closed(self) -> str:
        """The reason why the ranks cannot run; empty while they can."""
        return self._modules.closed


def decodes(step: Step) -> bool:
    """Return whether a program runs the step.

    Each sequence has one new token, or all tokens are rows. All their logits are requested, and no
    choices of routers are.
    """
    rows, starts = step.inputs["logit_rows"].tolist(), step.inputs["starts"].tolist()
    if step.routing is not None or "tables" not in step.inputs or not starts[-1]:
        return False
    alone = step.rows or starts == [*range(len(starts))]
    return alone and rows == [*range(starts[-1])]


def in_rows(step: Step) -> Step:
    """Return the step with the length and the blocks of each row instead of each sequence."""
    if not step.rows:
        return step
    starts = step.inputs["starts"]
    counts = starts.diff()
    lengths, tables = (step.inputs[name].repeat_interleave(counts, 0) for name in _PER_SEQUENCE)
    later = starts[1:].repeat_interleave(counts) - 1 - torch.arange(len(lengths))
    inputs = {**step.inputs, "lengths": lengths - later, "tables": tables}
    return replace(step, inputs=inputs)


_PER_SEQUENCE = ("lengths", "tables")
