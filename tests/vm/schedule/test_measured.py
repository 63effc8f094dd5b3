"""Measured steps: their origin, their workers, and the times that the simulated clock counts."""

from __future__ import annotations

import pytest
import torch

from tests.backends.reference.stepping import Case
from tests.inspect.schedules import BUFFERS, steps
from tpcompile.errors import UsageError
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.clock import Timing, timing
from tpcompile.vm.schedule.measured import (
    MeasuredSteps,
    instruction_times,
    measured_step,
    parts_at,
    typical,
)
from tpcompile.vm.targets import TARGETS


def made(policy: str) -> tuple[Program, list[float], Timing]:
    instructions = steps(3)
    costs = [step.cost for step in instructions]
    program = assemble("steps", BUFFERS, instructions, costs, policy, 3).program
    return program, costs, timing(program, costs)


def times_of(simulated: Timing, origin: int = 10**15) -> torch.Tensor:
    """Return the times in ns of a step that runs like its simulation."""
    count = len(simulated.starts)
    times = torch.zeros(count, 3, dtype=torch.int64)
    free: dict[int, float] = {}
    for number in sorted(range(count), key=lambda n: (simulated.starts[n], simulated.finishes[n])):
        moments = (
            free.get(simulated.workers[number], -5.0),
            simulated.starts[number],
            simulated.finishes[number],
        )
        times[number] = torch.tensor([origin + round(1000 * moment) for moment in moments])
        free[simulated.workers[number]] = simulated.finishes[number]
    return times


@pytest.mark.parametrize("policy", ["round-robin", "critical-path", "dynamic"])
def test_a_step_that_runs_like_its_simulation(policy: str) -> None:
    program, costs, simulated = made(policy)
    measured = measured_step(program, times_of(simulated))
    assert measured.step_us == pytest.approx(simulated.makespan)
    assert measured.timing.starts == pytest.approx(simulated.starts)
    assert measured.timing.finishes == pytest.approx(simulated.finishes)
    assert sorted(measured.timing.idle) == pytest.approx(sorted(simulated.idle))
    assert min(measured.begins) == 0.0, "waits for the step before do not count"
    assert instruction_times(program, measured) == pytest.approx(costs)
    if policy != "dynamic":
        assert measured.timing.workers == simulated.workers


def test_workers_of_a_shared_queue_do_one_thing_at_a_time() -> None:
    program, _, simulated = made("dynamic")
    assert program.sharing == 3
    measured = measured_step(program, times_of(simulated))
    assert set(measured.timing.workers) == {0, 1, 2}
    for worker in range(3):
        numbers = [n for n, w in enumerate(measured.timing.workers) if w == worker]
        numbers.sort(key=measured.begins.__getitem__)
        ends = [measured.timing.finishes[n] for n in numbers]
        assert all(end <= measured.begins[n] for end, n in zip(ends, numbers[1:], strict=False))


def test_delays_count_for_the_instruction_that_is_delayed() -> None:
    program, costs, simulated = made("critical-path")
    times = times_of(simulated)
    last = max(range(len(costs)), key=simulated.finishes.__getitem__)
    times[last, 1:] += 700
    measured = instruction_times(program, measured_step(program, times))
    assert measured[last] == pytest.approx(costs[last] + 0.7)
    assert measured[:last] == pytest.approx(costs[:last])


def test_typical_times_of_several_steps() -> None:
    assert typical([5.0, 1.0, 9.0, 2.0, 3.0]) == 2.0
    program, costs, simulated = made("critical-path")
    once = measured_step(program, times_of(simulated))
    slow = Timing(
        tuple(3 * t for t in simulated.starts),
        tuple(3 * t for t in simulated.finishes),
        (),
        simulated.workers,
    )
    measured = MeasuredSteps(program, [once, once, measured_step(program, times_of(slow))])
    assert measured.costs == pytest.approx(costs)
    assert (measured.step_us, measured.median_us) == pytest.approx((simulated.makespan,) * 2)
    assert measured.last.step_us == pytest.approx(3 * simulated.makespan)


def test_a_step_that_is_not_complete() -> None:
    program, _, simulated = made("critical-path")
    times = times_of(simulated)
    times[4] = 0
    with pytest.raises(UsageError, match="some instructions of the step did not run"):
        measured_step(program, times)


def test_parts_at_another_context() -> None:
    """Only attention depends on it; at the context of the plan they are the program's own."""
    program = Case("tiny-qwen3", lengths=(5,), workers=2, spans=2).program
    target = TARGETS["cpu"]
    planned = [instruction.cost(target) for instruction in program.instructions]  # type: ignore[attr-defined]

    def costs(context: int) -> list[float]:
        parts = parts_at(program, target, context)
        return [part.total(target.worker_bytes_per_us) for part in parts]

    assert costs(64) == pytest.approx(planned)
    longer = costs(640)
    for instruction, short, long in zip(program.instructions, planned, longer, strict=True):
        assert (long > short) == instruction.label.startswith("partial_attention")
