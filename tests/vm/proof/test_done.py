"""`Done` finds exactly the instructions complete in all legal orders, in little space and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import MANY, Touch, layered, programs
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.proof.conflict import heads_of
from tpcompile.vm.proof.done import Done
from tpcompile.vm.proof.earlier import Earlier
from tpcompile.vm.proof.execution import run_order
from tpcompile.vm.proof.known import Known, has
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.policies import POLICIES


def assert_exact(program: Program) -> None:
    """Compare with an adversary that delays each instruction in turn."""
    order = list(run_order(program))
    known = dict(Done(program, order).walk())
    for held in order:
        shared = program.sharing > 1
        tried = list(run_order(program, held, apart=shared))
        before = set(tried[: tried.index(held)])
        for number in order:
            if number != held:
                assert has(known[number], held) == (number not in before)


@MANY
@given(programs(most=8))
def test_what_is_known_to_be_done_is_what_cannot_be_overtaken(program: Program) -> None:
    assert_exact(program)


@MANY
@given(programs(most=8), st.data())
def test_and_so_it_is_with_waits_for_some_signals(program: Program, data: st.DataObject) -> None:
    """`Done` stays exact with shared counters and lowered thresholds."""
    counters = st.integers(0, max(0, program.counters // 2))
    moved = [data.draw(counters) for _ in range(program.counters)]
    waits = tuple(
        tuple(Wait(moved[w.counter], data.draw(st.integers(0, w.until))) for w in old)
        for old in program.waits
    )
    signals = tuple(tuple(moved[counter] for counter in old) for old in program.signals)
    assert_exact(replace(program, waits=waits, signals=signals))


def test_signallers_that_stand_behind_the_wait() -> None:
    """A signaller after the wait, in the waiter's own queue, does not weaken the wait."""
    program = Program(
        (),
        tuple(Touch() for _ in range(4)),
        ((0,), (1,), (2, 3)),
        waits=((), (), (Wait(0, 2),), ()),
        signals=((0,), (0,), (), (0,)),
    )
    known = dict(Done(program, list(run_order(program))).walk())
    assert has(known[2], 0) and has(known[2], 1)
    assert_exact(program)


@pytest.mark.parametrize("sharing", [1, 2])
def test_waits_for_some_signals_are_walked_a_few_times(sharing: int) -> None:
    """The number of rounds is constant, so the time grows linearly with the program."""
    rounds = []
    for layers in (6, 12):
        buffers, steps = layered(layers, ranks=2, blocks=4)
        costs = [1.0] * len(steps)
        program = assemble("", buffers, steps, costs, "critical-path", 3, 2).program
        lowered = tuple(
            tuple(Wait(w.counter, max(1, w.until - 1)) for w in waits) for waits in program.waits
        )
        done = Counted(replace(program, waits=lowered, sharing=sharing), list(run_order(program)))
        assert len(list(done.walk())) == len(steps)
        rounds.append(done.rounds)
        assert done.met == done.rounds * len(done._partial), "each wait is met once per round"
    assert rounds[1] <= rounds[0] + 1


def test_waits_for_the_step_before_need_no_further_round() -> None:
    waits = ((Wait(0, 0),), (Wait(0, -1),), (Wait(0, 2),))
    program = Program((), (Touch(),) * 3, ((0,), (1,), (2,)), waits, ((0,), (0,), ()), repeats=True)
    done = Counted(program, [0, 1, 2])
    assert [known for _, known in done.walk()] == [(0, 0), (0, 0), (2, 0)]
    assert (done.rounds, done.met) == (1, 0)


class Counted(Done):
    """`Done` that counts its rounds over the program and the waits that it evaluates."""

    rounds = met = 0

    def _once_met(self, wait: Wait) -> Known:
        self.met += 1
        return super()._once_met(wait)

    def _round(self) -> Iterator[tuple[int, Known]]:
        self.rounds += 1
        return super()._round()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_size_of_sets_does_not_depend_on_the_number_of_layers(policy: str) -> None:
    sizes = []
    for layers in (6, 12):
        buffers, steps = layered(layers, ranks=2, blocks=4)
        costs = [1.0 + number % 3 for number in range(len(steps))]
        program = assemble("", buffers, steps, costs, policy, 3, 2, repeats=True).program
        assert check_program(program) == []
        walk = Done(program, list(run_order(program))).walk()
        widest = max(bits.bit_length() for _, (_, bits) in walk)
        earlier = Earlier(program, heads_of(steps))
        several = [some for conflicts in earlier.by_instruction for some in conflicts]
        sizes.append((widest, max(bits.bit_length() for _, _, bits in several)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_counters_grow_with_the_layers(policy: str) -> None:
    counts = []
    for layers in (6, 9, 12):
        buffers, steps = layered(layers, ranks=2, blocks=4)
        program = assemble("", buffers, steps, [1.0] * len(steps), policy, 3, 2).program
        counts.append(program.counters)
    assert counts[2] - counts[1] <= counts[1] - counts[0] + 2
