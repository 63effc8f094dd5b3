"""Tests of the simulated clock: workers, waits and shared queues."""

from __future__ import annotations

import pytest

from tests.vm.programs import Touch
from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.schedule.clock import timing


def test_a_wait_ends_with_the_signal_that_it_needs() -> None:
    """A wait for two of three signals ends with the second signal."""
    waits = ((), (), (), (Wait(0, 2),))
    program = Program((), (Touch(),) * 4, ((0,), (1,), (2,), (3,)), waits, ((0,),) * 3 + ((),))
    found = timing(program, [5.0, 1.0, 2.0, 1.0])
    assert found.starts == (0.0, 0.0, 0.0, 2.0)
    assert found.makespan == 5.0 and found.idle == (0.0, 4.0, 3.0, 4.0)
    assert found.workers == (0, 1, 2, 3)


def test_workers_share_a_queue() -> None:
    """A worker takes the next instruction, and then waits; others may overtake it."""
    waits = ((), (Wait(0, 1),), (), ())
    signals = ((0,), (), (), ())
    program = Program((), (Touch(),) * 4, ((0, 1, 2, 3),), waits, signals, sharing=3)
    found = timing(program, [4.0, 1.0, 1.0, 1.0])
    assert found.starts == (0.0, 4.0, 0.0, 1.0)
    assert found.workers == (0, 1, 2, 2)
    assert found.idle == (1.0, 4.0, 3.0)


def test_the_first_step_waits_for_no_step_before() -> None:
    program = Program((), (Touch(),), ((0,),), ((Wait(0, 0),),), ((0,),), repeats=True)
    assert timing(program, [2.0]).makespan == 2.0


def test_a_deadlock_is_no_schedule() -> None:
    program = Program((), (Touch(),) * 2, ((0,), (1,)), ((), (Wait(0, 2),)), ((0,), ()))
    with pytest.raises(VerifyError, match=r"it deadlocks\. Found 1 of 2 instructions started"):
        timing(program, [1.0, 1.0])
