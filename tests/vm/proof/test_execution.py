"""Tests of execution order, of an adversary's delays, and of unrolled steps."""

from __future__ import annotations

from tests.vm.programs import Touch
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.proof.execution import run_order, unrolled


def chain() -> Program:
    """Return a program in which a counter orders 0 before 1, and a queue 1 before 2."""
    waits = ((), (Wait(0, 1),), (), ())
    return Program((), (Touch(),) * 4, ((0, 3), (1, 2)), waits, ((0,), (), (), ()))


def test_all_that_can_run_does() -> None:
    assert list(run_order(chain())) == [0, 3, 1, 2]


def test_what_is_held_runs_when_nothing_else_can() -> None:
    assert list(run_order(chain(), held=0)) == [0, 3, 1, 2], "all others come after it"
    assert list(run_order(chain(), held=3)) == [0, 1, 2, 3]
    assert list(run_order(chain(), held=1)) == [0, 3, 1, 2]


def test_several_workers_at_a_queue_overtake_each_other() -> None:
    """With one worker per instruction, only the counter delays 1."""
    assert list(run_order(chain(), held=0, apart=True)) == [3, 2, 0, 1]


def test_what_waits_for_itself_never_runs() -> None:
    program = Program((), (Touch(),), ((0,),), ((Wait(0, 1),),), ((0,),))
    assert list(run_order(program)) == []


def test_steps_raise_the_same_counters() -> None:
    waits = ((Wait(1, 0),), (Wait(0, 1),))
    program = Program((), (Touch(),) * 2, ((0,), (1,)), waits, ((0,), (1,)), repeats=True)
    twice = unrolled(program, 2)
    assert twice.queues == ((0, 2), (1, 3)) and not twice.repeats
    assert twice.waits == ((Wait(1, 0),), (Wait(0, 1),), (Wait(1, 1),), (Wait(0, 2),))
    assert list(run_order(twice)) == [0, 1, 2, 3]
