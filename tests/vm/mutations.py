"""Scheduling mistakes in abstract programs, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.vm.programs import Touch
from tpcompile.vm.program import Join, Program, Region, Role, Wait

Draw = Callable[..., Any]
Mutation = Callable[[Program, Draw], Program]


def changed(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _place_in(lists: Any) -> st.SearchStrategy[tuple[int, int]]:
    places = [(n, place) for n, items in enumerate(lists) for place in range(len(items))]
    return st.sampled_from(places) if places else st.nothing()


def wait_dropped(program: Program, draw: Draw) -> Program:
    number, place = draw(_place_in(program.waits))
    waits = program.waits[number]
    return replace(
        program, waits=changed(program.waits, number, waits[:place] + waits[place + 1 :])
    )


def step_wait_dropped(program: Program, draw: Draw) -> Program:
    """Drop an instruction's wait for the previous step."""
    first = [n for n, waits in enumerate(program.waits) if any(w.until == 0 for w in waits)]
    number = draw(st.sampled_from(first) if first else st.nothing())
    waits = tuple(wait for wait in program.waits[number] if wait.until)
    return replace(program, waits=changed(program.waits, number, waits))


def threshold_off_by_one(program: Program, draw: Draw) -> Program:
    number, place = draw(_place_in(program.waits))
    waits = program.waits[number]
    wait = Wait(waits[place].counter, waits[place].until + draw(st.sampled_from([-1, 1])))
    return replace(program, waits=changed(program.waits, number, changed(waits, place, wait)))


def signal_dropped(program: Program, draw: Draw) -> Program:
    number, place = draw(_place_in(program.signals))
    signals = program.signals[number]
    remaining = signals[:place] + signals[place + 1 :]
    return replace(program, signals=changed(program.signals, number, remaining))


def signal_doubled(program: Program, draw: Draw) -> Program:
    number, _ = draw(_place_in(program.signals))
    return replace(program, signals=changed(program.signals, number, program.signals[number] * 2))


def signal_moved(program: Program, draw: Draw) -> Program:
    """Move signals to another instruction."""
    number, _ = draw(_place_in(program.signals))
    other = draw(st.integers(0, len(program.instructions) - 1))
    signals = changed(program.signals, number, ())
    moved = signals[other] + program.signals[number]
    return replace(program, signals=changed(signals, other, moved))


def queue_order_swapped(program: Program, draw: Draw) -> Program:
    long = [place for place, queue in enumerate(program.queues) if len(queue) > 1]
    place = draw(st.sampled_from(long) if long else st.nothing())
    queue = program.queues[place]
    index = draw(st.integers(0, len(queue) - 2))
    swapped = (*queue[:index], *reversed(queue[index : index + 2]), *queue[index + 2 :])
    return replace(program, queues=changed(program.queues, place, swapped))


def counter_shared(program: Program, draw: Draw) -> Program:
    """Merge two counters without changing thresholds."""
    target, other = (draw(st.integers(0, max(0, program.counters - 1))) for _ in range(2))

    def moved(counter: int) -> int:
        return target if counter == other else counter

    return replace(
        program,
        waits=tuple(
            tuple(Wait(moved(w.counter), w.until) for w in waits) for waits in program.waits
        ),
        signals=tuple(tuple(map(moved, signals)) for signals in program.signals),
    )


def queue_changed(program: Program, draw: Draw) -> Program:
    """Move an instruction to the end of another queue, possibly of another rank."""
    number = draw(st.integers(0, len(program.instructions) - 1))
    target = draw(st.integers(0, len(program.queues) - 1))
    queues = [tuple(n for n in queue if n != number) for queue in program.queues]
    queues[target] = (*queues[target], number)
    return replace(program, queues=tuple(queues))


def rank_changed(program: Program, draw: Draw) -> Program:
    """Swap two instructions of different ranks."""
    ranks = [instruction.rank for instruction in program.instructions]
    if len(set(ranks)) < 2:
        draw(st.nothing())
    number = draw(st.integers(0, len(ranks) - 1))
    other = draw(st.sampled_from([n for n, rank in enumerate(ranks) if rank != ranks[number]]))
    swap = {number: other, other: number}
    queues = (tuple(swap.get(n, n) for n in queue) for queue in program.queues)
    return replace(program, queues=tuple(queues))


def workers_added(program: Program, draw: Draw) -> Program:
    """Let several workers share queues whose order matters."""
    return replace(program, sharing=3)


def buffer_shared(program: Program, draw: Draw) -> Program:
    """Merge two regions, as if a buffer were used for two purposes."""
    regions = sorted({r for i in program.instructions for r in (*i.reads, *i.writes)})
    if len(regions) < 2:
        draw(st.nothing())
    old, new = draw(st.permutations(regions))[:2]

    def moved(accesses: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(new if region == old else region for region in accesses)

    return _with(program, lambda i: replace(i, reads=moved(i.reads), writes=moved(i.writes)))


def region_shrunk(program: Program, draw: Draw) -> Program:
    """Schedule for smaller regions than the real ones, which are whole buffers."""
    number = draw(st.integers(0, len(program.instructions) - 1))

    def whole(accesses: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(Region(r.buffer, program.buffers[r.buffer].box) for r in accesses)

    old: Any = program.instructions[number]
    true = replace(old, reads=whole(old.reads), writes=whole(old.writes))
    return replace(program, instructions=changed(program.instructions, number, true))


def made_scratch(program: Program, draw: Draw) -> Program:
    """Make some buffers scratch memory, which is undefined before a step."""
    roles = [draw(st.sampled_from([Role.SCRATCH, buffer.role])) for buffer in program.buffers]
    buffers = zip(program.buffers, roles, strict=True)
    return replace(program, buffers=tuple(replace(b, role=role) for b, role in buffers))


def head_split(program: Program, draw: Draw) -> Program:
    """Drop one block of a head."""
    number, join = _block(program, draw)
    return _with_joins(program, number, tuple(j for j in _joins(program, number) if j != join))


def part_overlapping(program: Program, draw: Draw) -> Program:
    """Make a block one row longer or shorter."""
    number, join = _block(program, draw)
    start, stop = join.part
    part = draw(st.sampled_from([(start - 1, stop), (start, stop + 1), (start + 1, stop)]))
    return _with_joins(program, number, (join._replace(part=part),))


def arrivals_wrong(program: Program, draw: Draw) -> Program:
    number, join = _block(program, draw)
    arrivals = join.arrivals + draw(st.sampled_from([-1, 1]))
    return _with_joins(program, number, (join._replace(arrivals=arrivals),))


def slot_shared(program: Program, draw: Draw) -> Program:
    """Make two heads count arrivals in one slot."""
    regions = sorted({join.region for i in program.instructions for join in i.joins})
    if len(regions) < 2:
        draw(st.nothing())
    old, new = draw(st.permutations(regions))[:2]
    return _with(
        program,
        lambda i: replace(
            i, joins=tuple(j._replace(region=new) if j.region == old else j for j in i.joins)
        ),
    )


def _block(program: Program, draw: Draw) -> tuple[int, Join]:
    number, place = draw(_place_in([i.joins for i in program.instructions]))
    return number, program.instructions[number].joins[place]


def _joins(program: Program, number: int) -> tuple[Join, ...]:
    return tuple(program.instructions[number].joins)


def _with_joins(program: Program, number: int, joins: tuple[Join, ...]) -> Program:
    old = program.instructions[number]
    assert isinstance(old, Touch)
    instructions = changed(program.instructions, number, replace(old, joins=joins))
    return replace(program, instructions=instructions)


def _with(program: Program, change: Callable[[Any], Any]) -> Program:
    return replace(program, instructions=tuple(map(change, program.instructions)))


MUTATIONS: tuple[Mutation, ...] = (
    wait_dropped,
    step_wait_dropped,
    threshold_off_by_one,
    signal_dropped,
    signal_doubled,
    signal_moved,
    queue_order_swapped,
    counter_shared,
    queue_changed,
    rank_changed,
    workers_added,
    buffer_shared,
    region_shrunk,
    made_scratch,
    head_split,
    part_overlapping,
    arrivals_wrong,
    slot_shared,
)
