"""The programs of a compiled model: one per batch size, all from one decode graph."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from tpcompile.backends.devices import machine_of
from tpcompile.backends.rotation import CPU
from tpcompile.backends.triton.emit import emit
from tpcompile.inspect.schedule import ScheduleReport
from tpcompile.inspect.step_trace import StepTrace, step_trace
from tpcompile.ir.info import info_of
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.runtime.ranks.step import ProgramSize
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.lowering.plan import AUTO
from tpcompile.vm.program import Program
from tpcompile.vm.program.text import format_program
from tpcompile.vm.schedule.measured import MeasuredSteps, measured_step
from tpcompile.vm.schedule.policies import policy_for
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import Target, target_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepProgram:
    """The program of a decode step and its schedule."""

    program: Program
    schedule: ScheduleReport

    def text(self) -> str:
        """Return the text of the program, which can be parsed again."""
        return format_program(self.program)

    def kernel(self) -> str:
        """Return the source of the Triton kernel that runs the program."""
        return emit(self.program).source


@dataclass(frozen=True)
class ProgramOptions:
    """The options of programs; None selects the default."""

    target: str | None = None
    policy: str | None = None
    lowering: str | None = None
    spans: int | None = None


@dataclass(frozen=True)
class StepChoices:
    """The machine, the policy, the division of work and the attention spans of a decode step."""

    target: Target
    policy: str
    plan: StepPlan
    spans: int

    @classmethod
    def of(
        cls, target: Target, options: ProgramOptions, block: int = CacheKv.block, **sizes: int
    ) -> StepChoices:
        """Resolve the options for a machine, which is that of `options.target`, if it is given.

        `block` is the number of tokens per block of the KV cache, and `sizes` those of the plan.
        """
        policy = policy_for(target, options.policy)
        lowering = AUTO if options.lowering is None else options.lowering
        plan = StepPlan.on(target, lowering=lowering, **sizes)
        spans = options.spans or plan.spans_on(target, block)
        return cls(target, policy, plan, spans)


class StepPrograms:
    """The programs by batch size, each created on first use."""

    def __init__(
        self,
        fork: DecodeFork,
        options: ProgramOptions,
        max_seq_len: int,
        batch: int,
        device: torch.device = CPU,
        workers: int | None = None,
    ) -> None:
        """Create the decode graph and the program for `batch`, so that lowering fails early.

        `fork` has seen the pipeline of the prompt graph, which shares its weights and KV cache with
        the programs. The default target is the machine of `device`, which all ranks share.
        `workers` overrides the workers of a rank, except on a GPU.
        """
        passes = fork.passes
        tp = max((current.tp for current in passes if isinstance(current, PlanSharding)), default=1)
        target = (
            machine_of(device, tp, workers)
            if options.target is None
            else target_of(options.target, workers, tp)
        )
        self.batch = batch
        """The rows of the program for the batch that the model was compiled for."""
        block = max(
            (current.block for current in passes if isinstance(current, CacheKv)), default=1
        )
        sizes = {"batch": self.batch, "max_seq_len": max_seq_len}
        self._choices = StepChoices.of(target, options, block, **sizes)
        self._graph = fork.run(self._choices.spans)
        self._by_size: dict[ProgramSize, StepProgram] = {}
        self.steps = 0
        """The number of steps that the programs have run."""
        self.for_batch(self.batch)

    @property
    def ranks(self) -> int:
        return info_of(self._graph).tp

    @property
    def most_steps(self) -> int:
        """The maximum number of steps per launch."""
        return self._choices.plan.steps

    @property
    def most_stops(self) -> int:
        """The maximum number of tokens that end a sequence."""
        return self._choices.plan.stops

    def for_batch(self, batch: int) -> StepProgram:
        """Return the verified program for `batch` sequences."""
        return self.of_size(ProgramSize(batch))

    def of_size(self, size: ProgramSize) -> StepProgram:
        """Return the verified program of this size."""
        if size not in self._by_size:
            self._by_size[size] = self._make(size)
        return self._by_size[size]

    def trace(self, size: ProgramSize, context: int, times: torch.Tensor) -> StepTrace:
        """Return a step beside its simulation, given its times, `[instructions, 3]` in ns."""
        step_program = self.of_size(size)
        steps = MeasuredSteps(step_program.program, [measured_step(step_program.program, times)])
        options = step_program.schedule.choices
        title = f"{options['model']}, tp={options['tp']}, batch {size.batch}, {context:,} tokens"
        return step_trace(f"{title}, on {options['target']}", steps, self._choices.target, context)

    def _make(self, size: ProgramSize) -> StepProgram:
        target, policy = self._choices.target, self._choices.policy
        plan = replace(self._choices.plan, **size._asdict())
        schedule = scheduled(self._graph, target, plan, policy)
        log.info(
            "program for a batch of %d: %d instructions on %d workers per rank of %s, policy %s",
            size.batch,
            len(schedule.program.instructions),
            target.workers,
            target.name,
            policy,
        )
        options = {
            "model": info_of(self._graph).name,
            "target": target.name,
            "tp": info_of(self._graph).tp,
            "workers": target.workers,
            "policy": policy,
            "batch": size.batch,
        }
        return StepProgram(schedule.proved, ScheduleReport(options, schedule))
