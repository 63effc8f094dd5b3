"""The verifier is judged by the adversary: it accepts what cannot be broken, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vm.programs import Touch, program_of, programs
from tpcompile.errors import VerifyError
from tpcompile.vm.oracle import deadlocked, overtaken
from tpcompile.vm.program import Program, Wait
from tpcompile.vm.region import Buffer, Region
from tpcompile.vm.verify import check_program, verify_program

MANY = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@MANY
@given(programs())
def test_what_is_derived_is_right_and_is_accepted(program: Program) -> None:
    assert not deadlocked(program)
    assert overtaken(program) is None
    assert check_program(program) == []
    verify_program(program)


def _changed(own: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*own[:place], value, *own[place + 1 :])


def wait_dropped(program: Program, draw: Callable[..., Any]) -> Program:
    number, place = draw(_place_in(program.waits))
    own = program.waits[number]
    return replace(program, waits=_changed(program.waits, number, own[:place] + own[place + 1 :]))


def threshold_off_by_one(program: Program, draw: Callable[..., Any]) -> Program:
    number, place = draw(_place_in(program.waits))
    own = program.waits[number]
    wait = Wait(own[place].counter, own[place].until + draw(st.sampled_from([-1, 1])))
    return replace(program, waits=_changed(program.waits, number, _changed(own, place, wait)))


def signal_dropped(program: Program, draw: Callable[..., Any]) -> Program:
    number, _ = draw(_place_in(program.signals))
    return replace(program, signals=_changed(program.signals, number, ()))


def signal_doubled(program: Program, draw: Callable[..., Any]) -> Program:
    number, _ = draw(_place_in(program.signals))
    return replace(program, signals=_changed(program.signals, number, program.signals[number] * 2))


def signal_moved(program: Program, draw: Callable[..., Any]) -> Program:
    number, _ = draw(_place_in(program.signals))
    other = draw(st.integers(0, len(program.instructions) - 1))
    signals = _changed(program.signals, number, ())
    return replace(
        program, signals=_changed(signals, other, signals[other] + program.signals[number])
    )


def queue_order_swapped(program: Program, draw: Callable[..., Any]) -> Program:
    long = [worker for worker, queue in enumerate(program.queues) if len(queue) > 1]
    worker = draw(st.sampled_from(long)) if long else 0
    queue = program.queues[worker]
    place = draw(st.integers(0, max(0, len(queue) - 2)))
    swapped = (*queue[:place], *reversed(queue[place : place + 2]), *queue[place + 2 :])
    return replace(program, queues=_changed(program.queues, worker, swapped))


def counter_shared(program: Program, draw: Callable[..., Any]) -> Program:
    """Two counters become one, each wait still for as many as before."""
    one, other = (draw(st.integers(0, max(0, program.counters - 1))) for _ in range(2))

    def moved(counter: int) -> int:
        return one if counter == other else counter

    return replace(
        program,
        waits=tuple(tuple(Wait(moved(w.counter), w.until) for w in own) for own in program.waits),
        signals=tuple(tuple(map(moved, own)) for own in program.signals),
    )


def worker_changed(program: Program, draw: Callable[..., Any]) -> Program:
    """An instruction goes to the end of another queue."""
    number = draw(st.integers(0, len(program.instructions) - 1))
    target = draw(st.integers(0, len(program.queues) - 1))
    rest = [tuple(n for n in queue if n != number) for queue in program.queues]
    rest[target] = (*rest[target], number)
    return replace(program, queues=tuple(rest))


def _place_in(lists: tuple[tuple[Any, ...], ...]) -> st.SearchStrategy[tuple[int, int]]:
    places = [(n, place) for n, own in enumerate(lists) for place in range(len(own))]
    return st.sampled_from(places) if places else st.nothing()


MUTATIONS = (
    wait_dropped,
    threshold_off_by_one,
    signal_dropped,
    signal_doubled,
    signal_moved,
    queue_order_swapped,
    counter_shared,
    worker_changed,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_verifier_says_what_the_adversary_says(mutation: Any) -> None:
    seen = {"broken": 0, "safe": 0, "refused although safe": 0}

    @MANY
    @given(st.data())
    def judge(data: st.DataObject) -> None:
        program = data.draw(programs())
        mutant = mutation(program, data.draw)
        broken = deadlocked(mutant) or overtaken(mutant) is not None
        faults = check_program(mutant)
        if broken:
            seen["broken"] += 1
            assert faults, "the adversary breaks what the verifier accepts"
        else:
            seen["safe"] += 1
            seen["refused although safe"] += bool(faults)

    judge()
    assert seen["broken"] >= 5, seen  # a second signal seldom breaks anything
    assert seen["refused although safe"] <= 0.05 * seen["safe"], seen


X = Buffer("x", (4,))
WHOLE, LOW, HIGH = Region(0, ((0, 4),)), Region(0, ((0, 2),)), Region(0, ((2, 4),))


def residual() -> Program:
    """Two write halves, two read all, two write the halves again: each pair on two workers."""
    steps = (
        Touch(writes=(LOW,), label="down 0"),
        Touch(writes=(HIGH,), label="down 1"),
        Touch(reads=(WHOLE,), label="norm 0"),
        Touch(reads=(WHOLE,), label="norm 1"),
        Touch(writes=(LOW,), label="down 2"),
        Touch(writes=(HIGH,), label="down 3"),
    )
    return program_of((X,), steps, ((0, 2, 4), (1, 3, 5)))


def test_groups_share_counters() -> None:
    program = residual()
    assert program.counters == 2
    assert program.waits[2] == program.waits[3] == (Wait(0, 2),)
    assert program.waits[4] == program.waits[5] == (Wait(1, 2),)


def test_27_a_residual_written_while_another_still_reads_it() -> None:
    """Write after read: the second down projection does not wait for the norm of the other."""
    program = residual()
    careless = replace(program, waits=(*program.waits[:4], (), program.waits[5]))
    (fault,) = check_program(careless)
    assert fault.rule == "order"
    assert "norm 1 (instruction 3) reads x[0:4]" in fault.said
    assert "down 2 (instruction 4) writes x[0:2]" in fault.said
    with pytest.raises(VerifyError, match="the second can come first"):
        verify_program(careless)


def test_30_a_counter_that_the_wrong_signals_can_bring_there() -> None:
    """Both pairs of writers raise one counter, and the readers wait for two of the four."""
    program = residual()
    shared = replace(
        program,
        waits=tuple(tuple(Wait(0, w.until) for w in own) for own in program.waits),
        signals=((0,), (0,), (0,), (0,), (), ()),
    )
    assert any(fault.rule == "order" for fault in check_program(shared))


BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "an instruction in no queue": (
        lambda p: replace(p, queues=(p.queues[0], p.queues[1][:-1])),
        "in the queues 0 times",
    ),
    "an instruction twice": (
        lambda p: replace(p, queues=(p.queues[0], (*p.queues[1], 0))),
        "in the queues 2 times",
    ),
    "a queue of nothing": (
        lambda p: replace(p, queues=(p.queues[0], (*p.queues[1], 9))),
        "which is no instruction",
    ),
    "too few waits": (lambda p: replace(p, waits=p.waits[:-1]), "not so many waits"),
    "a region beyond its buffer": (
        lambda p: replace(p, buffers=(Buffer("x", (3,)),)),
        "2 to 4 in dimension 0, which goes from 0 to 3",
    ),
    "a buffer that is not there": (lambda p: replace(p, buffers=()), "touches buffer 0"),
    "a threshold that is never met": (
        lambda p: replace(p, waits=(*p.waits[:5], (Wait(1, 3),))),
        "waits for 3 signals of counter 1, which gets 2",
    ),
    "a circle": (
        lambda p: replace(p, waits=((Wait(1, 1),), *p.waits[1:]), queues=((0, 2, 4), (1, 5, 3))),
        "never run",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_say_what_is_wrong(name: str) -> None:
    change, said = BROKEN[name]
    faults = check_program(change(residual()))
    assert any(said in fault.said for fault in faults), faults
