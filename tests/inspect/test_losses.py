"""The parts of a step's time: the bandwidth limit, and what keeps the workers from loading."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.inspect.schedules import Step, ranked, step_timeline
from tpcompile.inspect.losses import CAUSES, Losses, losses_of
from tpcompile.inspect.timeline import Timeline
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.schedule.clock import timing_on
from tpcompile.vm.targets import Target

MACHINE = Target("machine", 2, 100.0, 1.0, 2.0, 10.0, 16, 1, 40.0, 0.5)
"""Two workers, each with 50 bytes and 20 multiply-accumulates per µs."""


@dataclasses.dataclass(frozen=True)
class Load(Step):
    """Instruction with a time on MACHINE."""

    work: int = 0
    delay: float = 0.0

    def parts(self, target: Target) -> Parts:
        fixed = target.instruction_us + self.values * target.value_us + self.delay
        return Parts(fixed, self.traffic, self.work / target.worker_macs_per_us)


def of(target: Target, *queues: list[Load]) -> Losses:
    """Return the losses of workers of one rank that run these instructions."""
    steps = [step for queue in queues for step in queue]
    numbers = iter(range(len(steps)))
    places = tuple(tuple(next(numbers) for _ in queue) for queue in queues)
    nothing: Any = ((),) * len(steps)
    program = Program((), tuple(steps), places, nothing, nothing)
    parts = [step.parts(target) for step in steps]
    return losses_of(program, parts, timing_on(program, parts, target), target)


def load(traffic: int = 0, **more: Any) -> Load:
    return Load("load", traffic=traffic, **more)


ONE = load(100)
"""1 µs of dispatch and 2 µs of loads."""


@pytest.mark.parametrize(
    ("queues", "lost"),
    [
        (([ONE], [ONE]), {"dispatch": 1.0}),
        (([ONE, ONE], [ONE]), {"dispatch": 1.5, "waiting": 1.5}),
        (([load(100, work=60)], [ONE]), {"dispatch": 1.0, "arithmetic": 0.5, "waiting": 0.5}),
        (([load(100, values=2)], [ONE]), {"dispatch": 1.0, "values": 0.5, "waiting": 0.5}),
        (([load(100, delay=3.0)], [ONE]), {"dispatch": 1.0, "exchange": 1.5, "waiting": 1.5}),
    ],
)
def test_what_workers_do_instead_of_loading(
    queues: tuple[list[Load], ...], lost: dict[str, float]
) -> None:
    losses = of(MACHINE, *queues)
    assert losses.lost_us == pytest.approx(dict.fromkeys(CAUSES, 0.0) | lost)
    assert losses.limit.floor_us + sum(lost.values()) == pytest.approx(losses.makespan)


def test_a_worker_that_loads_faster_makes_up_for_others() -> None:
    """One worker loads at the whole bandwidth, so the other's waiting costs nothing then."""
    alone = dataclasses.replace(MACHINE, alone_bytes_per_us=100.0)
    losses = of(alone, [ONE], [])
    assert losses.makespan == 2.0 and losses.limit.floor_us == 1.0
    assert sum(losses.lost_us.values()) == pytest.approx(1.0)
    assert losses.lost_us["waiting"] == pytest.approx(2 * losses.lost_us["dispatch"])


def test_the_rank_that_loads_most_counts() -> None:
    timeline = ranked(2, 2, 2)
    loads = tuple(
        dataclasses.replace(instruction, rank=number % 2, traffic=10 * (1 + number % 2))  # type: ignore[type-var]
        for number, instruction in enumerate(timeline.program.instructions)
    )
    program = dataclasses.replace(timeline.program, instructions=loads)
    parts = [step.parts(MACHINE) for step in loads]
    losses = losses_of(program, parts, timeline.timing, MACHINE)
    assert losses.limit.loaded == sum(step.traffic for step in loads if step.rank == 1)  # type: ignore[attr-defined]
    whole = losses.limit.floor_us + sum(losses.lost_us.values())
    assert whole == pytest.approx(timeline.timing.makespan)


def test_in_words() -> None:
    losses = of(MACHINE, [ONE, ONE], [ONE])
    assert losses.text() == (
        "3.0 µs (50%) bandwidth limit + 1.5 µs (25%) waiting for other instructions + "
        "1.5 µs (25%) dispatch"
    )
    assert losses.to_json() == dict.fromkeys(CAUSES, 0.0) | {"waiting": 1.5, "dispatch": 1.5}


def test_an_empty_program_loses_nothing() -> None:
    timeline: Timeline = step_timeline(1, 2)
    empty = dataclasses.replace(timeline.program, instructions=(), waits=(), signals=())
    timing = dataclasses.replace(timeline.timing, starts=(), finishes=(), idle=(0.0, 0.0))
    assert set(losses_of(empty, (), timing, MACHINE).lost_us.values()) == {0.0}
