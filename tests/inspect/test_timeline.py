"""Tests of tracks, of the instruction that released each instruction, and of the critical path."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from tests.inspect.schedules import step_timeline
from tpcompile.inspect.timeline import Timeline, Track, layer_of
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.policies import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_hold_every_instruction_once_and_in_time(policy: str) -> None:
    timeline = step_timeline(3, 4, policy)
    timing = timeline.timing
    assert timeline.tracks == tuple(Track(0, worker) for worker in range(4))
    assert sorted(n for row in timeline.rows for n in row) == list(range(len(timing.starts)))
    for row in timeline.rows:
        for early, late in pairwise(row):
            assert timing.finishes[early] <= timing.starts[late] + 1e-9


def test_who_share_a_queue_have_a_track_each() -> None:
    timeline = step_timeline(3, 4, "dynamic")
    assert (len(timeline.program.queues), len(timeline.rows)) == (1, 4)
    assert all(timeline.rows)


def test_tracks_of_several_ranks() -> None:
    single = step_timeline(1, 4)
    double = Timeline(dataclasses.replace(single.program, ranks=2), single.timing)
    assert double.tracks == (Track(0, 0), Track(0, 1), Track(1, 0), Track(1, 1))
    assert double.rows == single.rows


def test_the_last_signal_counts() -> None:
    """The last signal needed releases an instruction: 3 waits for two counters, 4 for none."""
    program = dataclasses.replace(
        step_timeline(1).program,
        instructions=step_timeline(1).program.instructions[:5],
        queues=((0,), (1,), (2,), (3,), (4,)),
        waits=((), (), (), (Wait(0, 2), Wait(1, 1)), (Wait(0, 0),)),
        signals=((0,), (0,), (1,), (), ()),
    )
    timing = Timing((0, 0, 0, 5, 0), (2, 5, 3, 6, 1), (0,) * 5, (0, 1, 2, 3, 4))
    timeline = Timeline(program, timing)
    assert timeline.released_by == (None, None, None, 1, None)
    assert timeline.chain == (1, 3)
    together = dataclasses.replace(timing, finishes=(5, 5, 3, 6, 1))
    assert Timeline(program, together).released_by[3] == 0, "ties go to the first instruction"
    early = dataclasses.replace(program, waits=(*program.waits[:3], (Wait(0, 1),), ()))
    assert Timeline(early, timing).released_by[3] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_chain_fills_the_time(policy: str) -> None:
    """Each instruction of the critical path starts when its predecessor ends."""
    timeline = step_timeline(3, 4, policy)
    timing = timeline.timing
    assert timing.starts[timeline.chain[0]] == 0.0
    assert timing.finishes[timeline.chain[-1]] == timing.makespan
    for early, late in pairwise(timeline.chain):
        assert timing.finishes[early] == pytest.approx(timing.starts[late])


def test_idle_is_a_part_of_the_workers_time() -> None:
    timeline = step_timeline(2, 3)
    busy = sum(b - a for a, b in zip(timeline.timing.starts, timeline.timing.finishes, strict=True))
    assert timeline.idle == pytest.approx(1 - busy / (3 * timeline.timing.makespan))


def test_an_empty_program_has_a_timeline() -> None:
    timeline = Timeline(Program((), (), ((), ()), (), ()), Timing((), (), (0.0, 0.0)))
    assert (timeline.rows, timeline.chain, timeline.idle) == (((), ()), (), 0.0)
    assert timeline.released_by == ()


def test_kinds_and_layers() -> None:
    first, second = step_timeline(1).program.instructions[:2]
    assert (first.name, layer_of(first)) == ("embed", None)
    assert (second.name, layer_of(second)) == ("norm_qkv_rows", 0)
