"""Tests of the simulated clock: workers, waits and shared queues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vm.programs import Touch
from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.schedule.clock import timing, timing_on
from tpcompile.vm.targets import TARGETS


def test_a_wait_ends_with_the_signal_that_it_needs() -> None:
    """A wait for two of three signals ends with the second signal."""
    waits = ((), (), (), (Wait(0, 2),))
    program = Program((), (Touch(),) * 4, ((0,), (1,), (2,), (3,)), waits, ((0,),) * 3 + ((),))
    times = timing(program, [5.0, 1.0, 2.0, 1.0])
    assert times.starts == (0.0, 0.0, 0.0, 2.0)
    assert times.makespan == 5.0 and times.idle == (0.0, 4.0, 3.0, 4.0)
    assert times.workers == (0, 1, 2, 3)


def test_workers_share_a_queue() -> None:
    """A worker takes the next instruction, and then waits; others may overtake it."""
    waits = ((), (Wait(0, 1),), (), ())
    signals = ((0,), (), (), ())
    program = Program((), (Touch(),) * 4, ((0, 1, 2, 3),), waits, signals, sharing=3)
    times = timing(program, [4.0, 1.0, 1.0, 1.0])
    assert times.starts == (0.0, 4.0, 0.0, 1.0)
    assert times.workers == (0, 1, 2, 2)
    assert times.idle == (1.0, 4.0, 3.0)


def test_the_first_step_waits_for_no_step_before() -> None:
    program = Program((), (Touch(),), ((0,),), ((Wait(0, 0),),), ((0,),), repeats=True)
    assert timing(program, [2.0]).makespan == 2.0


def test_a_deadlock_is_no_schedule() -> None:
    program = Program((), (Touch(),) * 2, ((0,), (1,)), ((), (Wait(0, 2),)), ((0,), ()))
    with pytest.raises(VerifyError, match=r"it deadlocks\. Found 1 of 2 instructions started"):
        timing(program, [1.0, 1.0])


def _four(loading: int) -> tuple[Program, list[Parts]]:
    """Four workers, of which some load 100 bytes and the others compute for 1 µs."""
    program = Program((), (Touch(),) * 4, ((0,), (1,), (2,), (3,)), ((),) * 4, ((),) * 4)
    parts = [Parts(1.0, 100 if n < loading else 0, 0.0) for n in range(4)]
    return program, parts


@pytest.mark.parametrize(("loading", "us"), [(1, 2.5), (2, 2.5), (3, 3.25), (4, 4.0)])
def test_workers_that_load_share_the_bandwidth(loading: int, us: float) -> None:
    """Three of four use all of it; one or two are as fast as a worker alone."""
    target = replace(TARGETS["h200"], workers=4, bytes_per_us=400 / 3, alone_bytes_per_us=200 / 3)
    times = timing_on(*_four(loading), target)
    assert times.makespan == pytest.approx(us)
    assert times.costs[3] == pytest.approx(us if loading == 4 else 1.0)


def test_workers_that_cannot_borrow_bandwidth() -> None:
    target = replace(TARGETS["cpu"], workers=4, bytes_per_us=400 / 3)
    assert timing_on(*_four(1), target).makespan == pytest.approx(4.0)


def test_a_load_gets_faster_when_another_one_ends() -> None:
    target = replace(TARGETS["h200"], workers=2, bytes_per_us=100, alone_bytes_per_us=100)
    program = Program((), (Touch(),) * 2, ((0,), (1,)), ((),) * 2, ((),) * 2)
    times = timing_on(program, [Parts(0.0, 100, 0.0), Parts(0.0, 300, 0.0)], target)
    assert times.finishes == pytest.approx((2.0, 4.0))


def test_arithmetic_may_take_longer_than_loads() -> None:
    target = replace(TARGETS["h200"], workers=2, bytes_per_us=100, alone_bytes_per_us=100)
    program = Program((), (Touch(),) * 2, ((0,), (1,)), ((),) * 2, ((),) * 2)
    times = timing_on(program, [Parts(1.0, 100, 5.0), Parts(1.0, 0, 2.0)], target)
    assert times.finishes == pytest.approx((6.0, 3.0))


def test_ranks_do_not_share_a_memory() -> None:
    target = replace(TARGETS["h200"], workers=1, bytes_per_us=100, alone_bytes_per_us=100.5)
    program = Program((), (Touch(),) * 2, ((0,), (1,)), ((),) * 2, ((),) * 2, ranks=2)
    times = timing_on(program, [Parts(0.0, 100, 0.0)] * 2, target)
    assert times.finishes == pytest.approx((1.0, 1.0))
