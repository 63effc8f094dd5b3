"""`schedule`: make and verify the program of a model's decode step for a target."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TextIO

import torch

from tpcompile.backends.devices import machine_of
from tpcompile.backends.measuring import REPEATS, RandomMemory, measure
from tpcompile.backends.rotation import CPU
from tpcompile.backends.triton.ahead import Compiled, compile_ahead
from tpcompile.backends.triton.emit import emit
from tpcompile.errors import UsageError
from tpcompile.frontend import capture
from tpcompile.inspect.gantt import gantt_svg
from tpcompile.inspect.losses import losses_of
from tpcompile.inspect.notebook import table_html
from tpcompile.inspect.schedule import ScheduleReport
from tpcompile.inspect.step_trace import StepTrace
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.trace import write_trace
from tpcompile.libraries import library_errors
from tpcompile.options import (
    check_limit,
    check_shards,
    check_tp,
    dtype_of,
    passes_for,
    rounds_inputs,
    scheme_of,
    with_choices,
)
from tpcompile.passes import Pass, decode_pipeline, run_passes
from tpcompile.plugins import load_plugins
from tpcompile.rewriting.reproducer import write_reproducer
from tpcompile.runtime.programs import ProgramOptions, StepChoices
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.program.text import format_program
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import TARGETS, Target, target_of

DEFAULT_TARGET = "h200"
_CONTEXT = 1024
"""The default sequence length for costs, in tokens."""


@dataclass(frozen=True)
class Choices:
    """The machine, the division of work and the passes of a schedule."""

    tp: int
    target: Target
    plan: StepPlan
    passes: Sequence[Pass]
    policy: str

    @property
    def spans(self) -> int:
        """The number of attention spans."""
        return _most(self.passes, "spans")

    def by_name(self, model: str) -> dict[str, Any]:
        """Return the choices by name, for reports."""
        return {
            "model": model,
            "tp": self.tp,
            "target": self.target.name,
            "workers": self.plan.workers,
            "policy": self.policy,
            "lowering": self.plan.lowering,
            "spans": self.spans,
            "batch": self.plan.batch,
            "context": self.plan.context,
            "max_seq_len": self.plan.max_seq_len,
        }


def choose(
    *,
    tp: int = 1,
    target: str | Target = DEFAULT_TARGET,
    policy: str | None = None,
    workers: int | None = None,
    batch: int = 1,
    context: int | None = None,
    max_seq_len: int | None = None,
    lowering: str | None = None,
    spans: int | None = None,
    interleaved: bool = False,
    pipeline: str | Sequence[Pass] | None = None,
    measured: torch.device | None = None,
    kv: str | None = None,
    experts: str = "auto",
) -> Choices:
    """Resolve the options of `schedule`. Invalid ones are refused before a model is captured.

    Steps can be `measured` on a device of this machine only. Its ranks then share the cores or SMs.
    """
    check_tp(tp)
    for name, limit in (("spans", spans), ("context", context), ("max_seq_len", max_seq_len)):
        check_limit(name, limit)
    machine = target_of(target, workers)
    if measured:
        machine = _measurable(machine, measured, tp, workers)
    longest = max_seq_len or max(context or 0, _CONTEXT)
    context = context or min(longest, _CONTEXT)
    if context > longest:
        raise UsageError(
            f"context must be at most max_seq_len, got {context:,} and {longest:,} tokens",
            hint="Raise max_seq_len, or lower the context",
        )
    options = ProgramOptions(policy=policy, lowering=lowering, spans=spans)
    sizes = {"batch": batch, "max_seq_len": longest, "context": context}
    step = StepChoices.of(machine, options, **sizes)
    if pipeline is None:
        passes = decode_pipeline(tp, step.spans, interleaved=interleaved)
        passes = with_choices(passes, kv, experts)
    elif spans or interleaved:
        raise UsageError(
            "Spans and the rotary order are options of the default pipeline only",
            hint='Put them into the pipeline, as in "decode{spans=4,interleaved=true}"',
        )
    else:
        passes = passes_for(pipeline, tp, kv, experts)
        check_shards(passes, tp)
    choices = Choices(tp, machine, step.plan, passes, step.policy)
    block = _most(passes, "block")
    choices.plan.check_room(block)
    choices.plan.check_spans(choices.spans, block)
    return choices


def _measurable(machine: Target, device: torch.device, tp: int, workers: int | None) -> Target:
    """Return the target for a measurement: one of the device's kind, or one that a file describes.

    The target "cpu" gets an equal share of the cores for each rank, unless `workers` is given.
    """
    if machine.name not in TARGETS:
        return machine
    on_cpu = device.type == "cpu"
    if on_cpu != (machine.name == "cpu"):
        target = "target='cpu'" if on_cpu else "the target of a GPU, such as target='h100'"
        raise UsageError(
            f"measured=True runs the program on this machine's {'CPU' if on_cpu else 'GPU'}",
            got=f"target={machine.name!r}",
            expected=f"{target}, or a file that tpcompile calibrate wrote",
            hint="Choose where it runs: device='cuda'" if on_cpu else "",
        )
    return machine_of(device, tp) if on_cpu and not workers else machine


def _most(passes: Sequence[Pass], option: str) -> int:
    """Return the largest value of an option of passes, 1 if none has it."""
    return max((getattr(current, option, 1) for current in passes), default=1)


@dataclass(frozen=True)
class ScheduledStep:
    """A verified program of a decode step, and its simulated execution."""

    report: ScheduleReport

    @property
    def verified(self) -> bool:
        """Whether the program is proved: `schedule` raises a VerifyError if it is not."""
        return not self.report.schedule.faults

    @property
    def program(self) -> Program:
        """The instructions, queues and counters."""
        return self.report.schedule.program

    @property
    def title(self) -> str:
        """A one-line summary of the model and the choices."""
        choices = self.report.choices
        return (
            f"{choices['model']}, tp={choices['tp']}, batch {choices['batch']}, "
            f"{choices['context']:,} tokens, on {choices['target']}: {choices['policy']}"
        )

    def text(self) -> str:
        """Return the text of the program, which can be parsed again."""
        return format_program(self.program)

    def kernel(self) -> str:
        """Return the source of the Triton kernel that runs the program."""
        return emit(self.report.schedule.proved).source

    def svg(self, layers: tuple[int, int] | None = None) -> str:
        """Return a picture of the workers over time.

        A long program is shown as an overview and some layers in detail: from the first to before
        the second of `layers`, or the first ones that fit.
        """
        step, timeline = self.report.schedule, self._timeline
        spent = losses_of(step.program, step.parts, timeline.timing, step.target)
        limit = f"bandwidth limit {spent.limit.text(spent.makespan)}; {spent.limit.sharing}"
        notes = (limit, f"where the time goes: {spent.text()}")
        shown = None if layers is None else Range(*layers)
        return gantt_svg(timeline, self.title, step.critical_us, notes, shown)

    def _repr_html_(self) -> str:
        """Show the figures and the picture in a notebook."""
        return table_html(self.title, (), self.report.figures) + self.svg()

    def trace(self) -> str:
        """Return a trace in Chrome's format, which Perfetto opens."""
        file = io.StringIO()
        self.write_trace(file)
        return file.getvalue()

    def write_trace(self, file: TextIO) -> None:
        """Write the trace event by event, because the trace of a large model is large."""
        write_trace(self._timeline, self.title, file)

    def measure(
        self,
        repeats: int = REPEATS,
        progress: Callable[[int], None] = lambda done: None,
        device: torch.device = CPU,
    ) -> StepTrace:
        """Run steps on this machine, with random weights, and time every instruction.

        All ranks run in this process: on the CPU in the native executor, with one thread per
        worker, and on a GPU in one Triton kernel.
        """
        step, context = self.report.schedule, self.report.choices["context"]
        random = RandomMemory(device)
        steps = measure(step.proved, context, repeats=repeats, random=random, progress=progress)
        assert step.timing is not None
        return StepTrace(self.title, step.timing, steps)

    def compile_ahead(self, arch: str) -> Compiled:
        """Compile the Triton kernel for a GPU such as `sm_90`, which need not be here."""
        return compile_ahead(self.report.schedule.proved, arch)

    @cached_property
    def _timeline(self) -> Timeline:
        step = self.report.schedule
        assert step.timing is not None
        return Timeline(step.program, step.timing)


@library_errors()
def schedule(
    model: Any,
    *,
    tp: int = 1,
    target: str | Target = DEFAULT_TARGET,
    dtype: torch.dtype | str | None = None,
    policy: str | None = None,
    workers: int | None = None,
    batch: int = 1,
    context: int | None = None,
    max_seq_len: int | None = None,
    lowering: str | None = None,
    spans: int | None = None,
    interleaved: bool = False,
    pipeline: str | Sequence[Pass] | None = None,
    weights: str | None = None,
    head: str | None = None,
    activations: str = "16",
    kv: str | None = None,
    experts: str = "auto",
) -> ScheduledStep:
    """Return the program of a decode step of MODEL, scheduled on a target and verified.

    No weights are read. `target` is a name, a JSON file or a `Target`; `workers` overrides its
    number of workers. `context` is the sequence length for costs, `max_seq_len` that of the longest
    sequence. The `lowering` is "heads", "rows" or "auto". `spans` and `interleaved` are options of
    the default pipeline: the number of attention spans, and the order of rotary heads. `weights`,
    `head`, `activations`, `kv` and `experts` are those of `compile`.
    """
    load_plugins()
    scheme, rounds = scheme_of(weights, head), rounds_inputs(activations)
    choices = choose(
        tp=tp,
        target=target,
        policy=policy,
        workers=workers,
        batch=batch,
        context=context,
        max_seq_len=max_seq_len,
        lowering=lowering,
        spans=spans,
        interleaved=interleaved,
        pipeline=pipeline,
        kv=kv,
        experts=experts,
    )
    captured = capture(model, dtype=dtype_of(dtype), scheme=scheme, rounds=rounds).graph
    graph, _ = run_passes(captured, choices.passes, on_failure=write_reproducer)
    step = scheduled(graph, choices.target, choices.plan, choices.policy)
    _ = step.proved  # raises if it has faults
    return ScheduledStep(ScheduleReport(choices.by_name(_named(model)), step))


def _named(model: Any) -> str:
    return model if isinstance(model, str) else type(model).__name__
