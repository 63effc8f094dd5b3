"""Ranks that run decode steps and short prompts by programs, and other prompts by modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from tpcompile.backends.executor import EXECUTORS, OnTokens
from tpcompile.backends.rotation import CPU, rotation_of
from tpcompile.errors import UsageError
from tpcompile.inspect.step_trace import StepTrace
from tpcompile.runtime.programs import StepPrograms
from tpcompile.runtime.ranks.owner import check_open
from tpcompile.runtime.ranks.parts import Part, in_rows, joined, parts_of
from tpcompile.runtime.ranks.protocols import ModuleRanks, RanksOf
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode, size_for

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class ProgramRanks(RanksOf):
    """Ranks that compute sequences with few new tokens, and guesses, by a program.

    Modules compute all others: see `parts_of`. Both share each rank's weights and KV cache, so they
    may alternate.
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
        super().__init__(modules)
        self._modules, self._rotary = modules, rotary()
        self._loaded: set[ProgramSize] = set()
        self.module_steps = 0
        """The number of steps that the modules have run."""
        self.timed = False
        """Whether programs record the times of instructions."""
        self._torch_idle = False
        """Whether the last step returned tokens, after which torch's threads have no work."""
        self._last_timed: tuple[ProgramSize, int] | None = None
        """The size of the program of the last timed step, and the mean tokens per sequence."""

    @property
    def most_tokens(self) -> int:
        """The maximum number of new tokens of a sequence that a program computes."""
        return EXECUTORS[self.executor].most_tokens

    def run(self, step: Step) -> torch.Tensor:
        parts = self._parts(step)
        return joined(parts, [self._run(part) for part in parts])

    def run_all(self, step: Step) -> list[torch.Tensor]:
        """Run a step; return the result of every rank. A program has one result for all."""
        parts = self._parts(step)
        results = [self._run_all(part) for part in parts]
        return [joined(parts, rank_results) for rank_results in zip(*results, strict=True)]

    def _parts(self, step: Step) -> list[Part]:
        return parts_of(step, self.most_tokens if step.few else 1)

    def _run(self, part: Part) -> torch.Tensor:
        if not part.by_program:
            return self._by_modules(part.step, self._modules.run)
        values = self.launch(part.step)
        values = values[0] if part.step.output == "tokens" else values
        wanted = part.step.inputs["logit_rows"]
        return values if wanted.tolist() == [*range(values.shape[0])] else values[wanted]

    def _run_all(self, part: Part) -> list[torch.Tensor]:
        if not part.by_program:
            return self._by_modules(part.step, self._modules.run_all)
        return [self._run(part)] * self.programs.ranks

    def _by_modules(self, step: Step, run: Callable[[Step], _Result]) -> _Result:
        log.debug("modules: a step of %d tokens", len(step.inputs["input_ids"]))
        self._torch_idle = False
        result = run(step)
        self.module_steps += 1
        return result

    def launch(self, step: Step, on_tokens: OnTokens | None = None) -> torch.Tensor:
        """Run steps by a program; return their tokens, `[steps, sequences]`, or the last logits.

        `on_tokens` receives the tokens of each step as soon as they are known.
        """
        check_open(self.closed)
        step = in_rows(step)
        parts = EXECUTORS[self.executor].size_parts
        batch = size_for(step.inputs["lengths"].shape[0], parts)
        size = ProgramSize(batch, batch if step.rows else 1)
        if size not in self._loaded:
            self._load(size)
        request = replace(step, timed=True) if self.timed else step
        wait = partial(self._modules.run_program, size, request, on_tokens)
        output = wait() if self._torch_idle else EXECUTORS[self.executor].during(wait)
        self._torch_idle = step.output == "tokens"
        steps = len(output) if step.output == "tokens" else 1
        log.debug("program: %d steps of %d sequences", steps, len(step.inputs["lengths"]))
        self.programs.steps += steps
        if self.timed:
            tokens = float(step.inputs["lengths"].float().mean())
            self._last_timed = size, round(tokens) + steps - 1
        return output

    def _load(self, size: ProgramSize) -> None:
        """Load the program of this size. Its buffers outlive the inference mode of this call."""
        with torch.inference_mode(False):
            program = self.programs.of_size(size).program
            rotation = rotation_of(program, self._rotary, self._device)
            self._modules.load_program(StepCode(program, size, rotation, self.executor))
        self._loaded.add(size)

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
        """Return the maximum steps per launch, given the number of tokens that end a sequence."""
        return self.programs.most_steps if stops <= self.programs.most_stops else 1
