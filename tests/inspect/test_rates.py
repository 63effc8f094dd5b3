"""Rates over time: their sums are the loads and the work of the instructions."""

from __future__ import annotations

import dataclasses

import pytest

from tests.inspect.schedules import step_timeline
from tpcompile.inspect.rates import rates_of
from tpcompile.inspect.timeline import Timeline
from tpcompile.vm.schedule.clock import Timing


def test_an_instruction_loads_evenly_over_its_time() -> None:
    """One instruction runs from 1 to 3 µs, another from 3 to 4, in a step of 4 µs."""
    timeline = step_timeline(1, 2)
    first, other = (
        dataclasses.replace(step, traffic=traffic)  # type: ignore[type-var]
        for step, traffic in zip(timeline.program.instructions, (100, 30), strict=False)
    )
    program = dataclasses.replace(timeline.program, instructions=(first, other))
    timing = Timing((1.0, 3.0), (3.0, 4.0), (0.0, 0.0), (0, 1))
    rates = rates_of(Timeline(program, timing), range(2), 4)
    assert rates.piece_us == 1.0
    assert rates.bytes_per_us == pytest.approx([0, 50, 50, 30])
    assert rates.busy == pytest.approx([0, 1, 1, 1])
    assert rates_of(Timeline(program, timing), [1], 4).busy == pytest.approx([0, 0, 0, 1])
    coarse = rates_of(Timeline(program, timing), range(2), 2)
    assert coarse.bytes_per_us == pytest.approx([25, 40])


def test_an_empty_step_has_no_rates() -> None:
    timeline = step_timeline(1, 2)
    empty = dataclasses.replace(timeline.timing, starts=(), finishes=())
    assert set(rates_of(Timeline(timeline.program, empty), range(2), 3).busy) == {0.0}
