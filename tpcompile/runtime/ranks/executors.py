"""The executors of decode steps in one process, by the sizes of their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import tpcompile.backends.native
import tpcompile.backends.reference
import tpcompile.backends.triton  # noqa: F401 - registers its executor
from tpcompile.backends.executor import EXECUTORS, Executor, OnTokens
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.share import RankShare
from tpcompile.runtime.ranks.step import ProgramSize, Step, StepCode


class StepExecutors:
    """The executors of the ranks in this process, which share weights and caches with modules."""

    def __init__(self) -> None:
        self._executors: dict[ProgramSize, Executor] = {}
        self._times: dict[ProgramSize, torch.Tensor] = {}

    def load(
        self,
        code: StepCode,
        parameter: Callable[[int, str], torch.Tensor],
        caches: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        share: RankShare | None = None,
    ) -> None:
        """Load a program: of one rank with `share`, otherwise of all ranks.

        `parameter` returns a rank's tensors by name. `caches` and `states` are those of each rank
        here.
        """
        memory = StepMemory(
            code.program,
            parameter,
            code.rotation,
            caches,
            states,
            share=share,
            device=caches[0].device,
        )
        self._executors[code.size] = EXECUTORS[code.executor](memory)

    def run(
        self,
        size: ProgramSize,
        step: Step,
        caches: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        on_tokens: OnTokens | None = None,
    ) -> torch.Tensor:
        """Run `step.steps` steps; return their tokens, `[steps, rows]`, or the last logits.

        Of the logits, return the columns of the ranks in this process. The step may have fewer rows
        than the program, whose other rows stay empty. `on_tokens` receives the tokens of each step
        as soon as they are known.
        """
        executor, inputs = self._executors[size], step.inputs
        executor.memory.use_caches(caches, states)  # new tensors if they have grown
        executor.place(
            inputs["input_ids"],
            inputs["lengths"],
            inputs["tables"],
            inputs["positions"],
            step.stops,
            inputs.get("ended"),
            inputs.get("read"),
            inputs.get("write"),
            inputs["starts"].tolist() if step.rows else None,
        )
        options: list[torch.Tensor] = []
        if step.timed:
            count = len(executor.memory.program.instructions)
            options.append(torch.zeros(count, 3, dtype=torch.int64))
            self._times[size] = options[0]
        rows = inputs["lengths"].shape[0]

        def tell(tokens: torch.Tensor) -> None:
            if on_tokens is not None:
                on_tokens(tokens[:rows].long())

        done = executor.advance(step.steps, *options, on_tokens=tell if on_tokens else None)
        if step.output == "tokens":
            return executor.memory.tokens(done)[:, :rows].long()
        logits = executor.hand_over_logits()
        return logits if rows == logits.shape[0] else logits[:rows]

    def times(self, size: ProgramSize) -> torch.Tensor:
        """Return the times of the last step that was timed, `[instructions, 3]` in ns.

        The times of instructions of ranks in other processes are 0.
        """
        return self._times[size]

    def close(self) -> None:
        """Free the memory of all programs."""
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
