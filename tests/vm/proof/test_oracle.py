"""The oracle breaks unsafe programs, and accepts safe ones."""

from __future__ import annotations

from dataclasses import replace

from tests.vm.programs import KEPT, Touch, program_of
from tpcompile.vm.program import Buffer, Join, Program, Region, Wait
from tpcompile.vm.proof.oracle import (
    broken,
    deadlocked,
    misplaced,
    overtaken,
    split_head,
    undefined,
)

X, Q = Region(0, ((0, 4),)), Region(1, ((0, 4),))
BUFFERS = (Buffer("x", (4,)), Buffer("q", (4,)))


def pair(**more: bool) -> Program:
    """Return a write and a dependent read on two workers."""
    return program_of(BUFFERS, (Touch(writes=(X,)), Touch(reads=(X,))), ((0,), (1,)), **more)


def head() -> Program:
    blocks = (Touch(joins=(Join(Q, (2 * n, 2 * n + 2), 4, 2),)) for n in range(2))
    return program_of(BUFFERS, (*blocks, Touch(reads=(Q,))), ((0,), (1,), (2,)))


def test_an_early_reader() -> None:
    assert not broken(pair())
    assert overtaken(replace(pair(), waits=((), ()))) == (0, 1)


def test_queues_of_several_workers_keep_no_order() -> None:
    program = program_of(BUFFERS, (Touch(writes=(X,)), Touch(reads=(X,))), ((0, 1),))
    assert not broken(program)
    assert overtaken(replace(program, sharing=2)) == (0, 1)


def test_a_wait_that_is_never_over() -> None:
    assert deadlocked(replace(pair(), waits=((), (Wait(0, 2),))))
    assert deadlocked(replace(pair(), queues=((1, 0),), sharing=2)), "a single worker deadlocks"


def test_a_step_that_begins_before_the_last_is_done() -> None:
    program = pair(repeats=True)
    assert not broken(program)
    assert overtaken(replace(program, waits=((), *program.waits[1:]))) is not None


def test_memory_that_is_read_before_it_is_written() -> None:
    low = Region(0, ((0, 2),))
    steps = (Touch(writes=(low,)), Touch((X,), (X,)), Touch((X,)))
    program = program_of(BUFFERS, steps, ((0, 1, 2),))
    assert list(undefined(program)) == [(1, X)] and broken(program)
    assert not broken(replace(program, buffers=(replace(BUFFERS[0], role=KEPT), BUFFERS[1])))
    assert not broken(program_of(BUFFERS, (Touch(writes=(X,)), *steps), ((0, 1, 2, 3),)))


def test_another_ranks_worker() -> None:
    program = replace(pair(), ranks=2)
    assert misplaced(program)
    other = replace(program.instructions[1], rank=1)  # type: ignore[type-var]
    assert not misplaced(replace(program, instructions=(program.instructions[0], other)))


def test_heads_that_are_never_whole() -> None:
    program = head()
    assert split_head(program) is None
    first, last, reader = program.instructions
    (join,) = first.joins
    for joins in (
        (),
        (join._replace(part=(1, 3)),),
        (join._replace(arrivals=1),),
        (join._replace(arrivals=3),),
        (join._replace(whole=5),),
    ):
        steps = (replace(first, joins=joins), last, reader)  # type: ignore[type-var]
        assert split_head(replace(program, instructions=steps)) == Q
    assert split_head(replace(program, waits=((), (), ()))) == Q, "read before it is complete"
