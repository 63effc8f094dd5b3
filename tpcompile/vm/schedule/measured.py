"""Measured steps: when each instruction was taken, became ready and was done on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch

from tpcompile.errors import UsageError
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.schedule.clock import Timing, timing_on
from tpcompile.vm.targets import Target


@dataclass(frozen=True)
class MeasuredStep:
    """The measured times of one step, in µs after its first instruction became ready.

    A worker that waited for the end of the previous step has a begin of 0.
    """

    begins: tuple[float, ...]
    """When a worker took each instruction."""
    timing: Timing
    """When each instruction became ready, and when it was done."""

    @property
    def step_us(self) -> float:
        """The time from the first instruction that was ready to the last one that was done."""
        return self.timing.makespan


def measured_step(program: Program, times: torch.Tensor) -> MeasuredStep:
    """Return the step of `times[instructions, 3]`: taken, ready and done, in ns.

    If workers share a queue, the one that took an instruction is inferred: it is the worker of the
    queue that became free last before that.
    """
    if not bool((times > 0).all()):
        raise UsageError("The times are incomplete: some instructions of the step did not run")
    begins, readies, ends = (column.tolist() for column in times.unbind(1))
    origin = min(readies)
    us = [[(moment - origin) / 1000 for moment in moments] for moments in (begins, readies, ends)]
    workers = _workers(program, begins, ends)
    count = len(program.queues) * program.sharing
    busy = [0.0] * count
    for worker, start, end in zip(workers, us[1], us[2], strict=True):
        busy[worker] += end - start
    last = max(us[2])
    idle = tuple(last - duration for duration in busy)
    timing = Timing(tuple(us[1]), tuple(us[2]), idle, workers)
    return MeasuredStep(tuple(max(0.0, begin) for begin in us[0]), timing)


def _workers(program: Program, begins: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the worker of each instruction."""
    workers = [0] * len(begins)
    for place, queue in enumerate(program.queues):
        first = place * program.sharing
        free = [0] * program.sharing
        for number in sorted(queue, key=lambda n: (begins[n], ends[n])):
            fit = [w for w in range(program.sharing) if free[w] <= begins[number]]
            worker = max(fit, key=free.__getitem__)
            free[worker] = ends[number]
            workers[number] = first + worker
    return tuple(workers)


@dataclass(frozen=True)
class MeasuredSteps:
    """Several steps of one program, measured one after another."""

    program: Program
    steps: Sequence[MeasuredStep]

    @cached_property
    def last(self) -> MeasuredStep:
        return self.steps[-1]

    @property
    def step_us(self) -> float:
        """The typical time of a step."""
        return typical([step.step_us for step in self.steps])

    @property
    def median_us(self) -> float:
        """The median time of a step."""
        return median(step.step_us for step in self.steps)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The typical time of each instruction."""
        times = zip(*(instruction_times(self.program, step) for step in self.steps), strict=True)
        return tuple(map(typical, times))


def typical(samples: Sequence[float]) -> float:
    """Return the lower quartile: other processes can only make a sample longer."""
    return sorted(samples)[(len(samples) - 1) // 4]


def instruction_times(program: Program, step: MeasuredStep) -> list[float]:
    """Return the time of each instruction as the simulated clock counts it.

    It is the time from the moment when its worker was free and its dependencies were done, so it
    includes the delays of queues and counters.
    """
    finishes = step.timing.finishes
    ended: dict[Any, float] = {}
    signals: dict[int, list[float]] = {}
    for number, counters in enumerate(program.signals):
        for counter in counters:
            signals.setdefault(counter, []).append(finishes[number])
    for moments in signals.values():
        moments.sort()
    times = []
    for number, waits in enumerate(program.waits):
        start = step.begins[number]
        for wait in waits:
            if wait.until > 0 and wait not in ended:
                ended[wait] = signals[wait.counter][wait.until - 1]
            start = max(start, ended.get(wait, 0.0))
        # The signal precedes the moment that counts as the end, so an instruction may start early.
        times.append(finishes[number] - min(start, step.timing.starts[number]))
    return times


def timing_at(program: Program, target: Target, context: int) -> Timing:
    """Simulate a step on a target in which each sequence has `context` tokens."""
    return timing_on(program, parts_at(program, target, context), target)


def parts_at(program: Program, target: Target, context: int) -> tuple[Parts, ...]:
    """Return the parts of the instructions' times if each sequence has `context` tokens."""
    shared: dict[int, Any] = {}
    parts = []
    for instruction in program.instructions:
        operands = instruction.at  # type: ignore[attr-defined]
        if hasattr(operands, "planned"):
            if id(operands) not in shared:
                shared[id(operands)] = replace(operands, planned=context)
            instruction = replace(instruction, at=shared[id(operands)])  # type: ignore[type-var]
        parts.append(instruction.parts(target))  # type: ignore[attr-defined]
    return tuple(parts)
