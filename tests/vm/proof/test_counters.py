"""Counters are minimal, for any number of workers per queue, and between steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.vm.mutations import changed
from tests.vm.programs import MANY, Touch, program_of, programs
from tpcompile.vm.program import Buffer, Program, Region, Wait
from tpcompile.vm.proof.counters import assign_counters
from tpcompile.vm.proof.dependencies import dependencies
from tpcompile.vm.proof.oracle import broken

X, LOW, HIGH = Region(0, ((0, 4),)), Region(0, ((0, 2),)), Region(0, ((2, 4),))


@MANY
@given(programs(), st.data())
def test_no_wait_can_be_left_out(program: Program, data: st.DataObject) -> None:
    """Dropping any wait breaks the program, except waits for the previous step."""
    numbers = [
        number
        for number, instruction_waits in enumerate(program.waits)
        if instruction_waits and instruction_waits[-1].until
    ]
    if numbers:
        number = data.draw(st.sampled_from(numbers))
        waits = changed(program.waits, number, program.waits[number][:-1])
        assert broken(replace(program, waits=waits))


def test_what_the_queue_or_an_earlier_wait_says_is_not_said_again() -> None:
    steps = [Touch(writes=(X,)), Touch(reads=(X,)), Touch(reads=(X,)), Touch(reads=(X,))]
    ordering = assign_counters(dependencies(steps), ((0, 1), (2, 3)))
    assert ordering.waits == ((), (), (Wait(0, 1),), ())
    assert ordering.signals == ((0,), (), (), ())


def test_what_another_wait_says_is_not_said_again() -> None:
    """A wait implied by another one is omitted: here 0 follows 1 in its queue."""
    y = Region(1, ((0, 4),))
    steps = [Touch(writes=(y,)), Touch(writes=(X,)), Touch(reads=(X, y))]
    ordering = assign_counters(dependencies(steps), ((1, 0), (2,)))
    assert (ordering.waits[2], ordering.signals) == ((Wait(0, 1),), ((0,), (), ()))


def test_workers_that_share_a_queue_are_told_everything() -> None:
    steps = [Touch(writes=(X,)), Touch(reads=(X,)), Touch(reads=(X,))]
    ordering = assign_counters(dependencies(steps), ((0, 1, 2),), sharing=2)
    assert ordering.waits == ((), (Wait(0, 1),), (Wait(0, 1),))


def test_groups_with_the_same_waiters_share_a_counter() -> None:
    """Signallers with the same waiters share a counter: one counter for two signals."""
    y = Region(1, ((0, 4),))
    steps = [Touch(writes=(X,)), Touch(writes=(y,)), Touch(reads=(X, y)), Touch(reads=(X, y))]
    ordering = assign_counters(dependencies(steps), tuple((n,) for n in range(4)))
    assert ordering.waits[2:] == ((Wait(0, 2),), (Wait(0, 2),))
    steps[3] = Touch(reads=(X,))
    ordering = assign_counters(dependencies(steps), tuple((n,) for n in range(4)))
    assert ordering.waits[2:] == ((Wait(0, 1), Wait(1, 1)), (Wait(1, 1),)), "two counters"


def test_the_first_of_a_step_wait_for_the_last_of_the_one_before() -> None:
    steps = (Touch(writes=(LOW,)), Touch(writes=(HIGH,)), Touch(reads=(X,)))
    program = program_of((Buffer("x", (4,)),), steps, ((0, 2), (1,)), repeats=True)
    assert program.waits == ((), (Wait(1, 0),), (Wait(0, 2),)), "its queue orders 0 after 2"
    assert program.signals == ((0,), (0,), (1,))
    alone = program_of((Buffer("x", (4,)),), steps, ((0, 1, 2),), repeats=True)
    assert alone.waits == alone.signals == ((), (), ()), "a single worker separates its steps"
