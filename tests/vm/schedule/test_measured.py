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


def times_of(found: Timing, origin: int = 10**15) -> torch.Tensor:
    """The times in ns of a step that runs like its simulation."""
    count = len(found.starts)
    times = torch.zeros(count, 3, dtype=torch.int64)
    free: dict[int, float] = {}
    for number in sorted(range(count), key=lambda n: (found.starts[n], found.finishes[n])):
        moments = (
            free.get(found.workers[number], -5.0),
            found.starts[number],
            found.finishes[number],
        )
        times[number] = torch.tensor([origin + round(1000 * moment) for moment in moments])
        free[found.workers[number]] = found.finishes[number]
    return times


@pytest.mark.parametrize("policy", ["round-robin", "critical-path", "dynamic"])
def test_a_step_that_runs_like_its_simulation(policy: str) -> None:
    program, costs, simulated = made(policy)
    found = measured_step(program, times_of(simulated))
    assert found.step_us == pytest.approx(simulated.makespan)
    assert found.timing.starts == pytest.approx(simulated.starts)
    assert found.timing.finishes == pytest.approx(simulated.finishes)
    assert sorted(found.timing.idle) == pytest.approx(sorted(simulated.idle))
    assert min(found.begins) == 0.0, "waits for the step before do not count"
    assert instruction_times(program, found) == pytest.approx(costs)
    if policy != "dynamic":
        assert found.timing.workers == simulated.workers


def test_workers_of_a_shared_queue_do_one_thing_at_a_time() -> None:
    program, _, simulated = made("dynamic")
    assert program.sharing == 3
    found = measured_step(program, times_of(simulated))
    assert set(found.timing.workers) == {0, 1, 2}
    for worker in range(3):
        own = [n for n, w in enumerate(found.timing.workers) if w == worker]
        own.sort(key=found.begins.__getitem__)
        ends = [found.timing.finishes[n] for n in own]
        assert all(end <= found.begins[n] for end, n in zip(ends, own[1:], strict=False))


def test_delays_count_for_the_instruction_that_is_delayed() -> None:
    program, costs, simulated = made("critical-path")
    times = times_of(simulated)
    last = max(range(len(costs)), key=simulated.finishes.__getitem__)
    times[last, 1:] += 700
    found = instruction_times(program, measured_step(program, times))
    assert found[last] == pytest.approx(costs[last] + 0.7)
    assert found[:last] == pytest.approx(costs[:last])


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
    found = MeasuredSteps(program, [once, once, measured_step(program, times_of(slow))])
    assert found.costs == pytest.approx(costs)
    assert (found.step_us, found.median_us) == pytest.approx((simulated.makespan,) * 2)
    assert found.last.step_us == pytest.approx(3 * simulated.makespan)


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
    own = [one.cost(target) for one in program.instructions]  # type: ignore[attr-defined]

    def costs(context: int) -> list[float]:
        parts = parts_at(program, target, context)
        return [one.total(target.worker_bytes_per_us) for one in parts]

    assert costs(64) == pytest.approx(own)
    longer = costs(640)
    for one, short, long in zip(program.instructions, own, longer, strict=True):
        assert (long > short) == one.label.startswith("partial_attention")
