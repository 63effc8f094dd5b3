"""Wrong waits, signals and queues; instructions and their regions are unchanged."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.vm.mutants.bases import Base
from tests.vm.mutations import changed
from tpcompile.vm.program import Program, Wait, queue_by_instruction

Made = tuple[str, Program] | None
"""A description of the mistake and the program; None if the base does not allow it."""


def wait_dropped(base: Base, dice: Random) -> Made:
    """Drop a required wait of an instruction."""
    return _wait_changed(base, dice, step=False, offset=None)


def threshold_lowered(base: Base, dice: Random) -> Made:
    """Lower a threshold by one signal."""
    return _wait_changed(base, dice, step=False, offset=-1)


def threshold_raised(base: Base, dice: Random) -> Made:
    """Raise a threshold above the number of signals, which deadlocks."""
    return _wait_changed(base, dice, step=False, offset=1)


def step_wait_dropped(base: Base, dice: Random) -> Made:
    """Drop or lower a wait between steps."""
    return _wait_changed(base, dice, step=True, offset=dice.choice([None, -1]))


def _wait_changed(base: Base, dice: Random, step: bool, offset: int | None) -> Made:
    waits = base.program.waits
    places = [
        (n, place)
        for n, instruction_waits in enumerate(waits)
        for place, wait in enumerate(instruction_waits)
        if (wait.until == 0) is step
    ]
    if not places:
        return None
    number, place = dice.choice(places)
    old, wait = waits[number], waits[number][place]
    if offset is None:
        new = old[:place] + old[place + 1 :]
    else:
        new = changed(old, place, Wait(wait.counter, wait.until + offset))
    description = f"instruction {number} waits {new} instead of {old}"
    return description, replace(base.program, waits=changed(waits, number, new))


def wait_added(base: Base, dice: Random) -> Made:
    """Add an unnecessary wait, which is safe unless it deadlocks."""
    number = dice.randrange(len(base.program.instructions))
    counter = dice.randrange(base.program.counters)
    all_of_it = sum(counters.count(counter) for counters in base.program.signals)
    waits = base.program.waits
    new = (*waits[number], Wait(counter, all_of_it))
    description = f"{number} waits for {counter} too"
    return description, replace(base.program, waits=changed(waits, number, new))


def wait_too_early(base: Base, dice: Random) -> Made:
    """Move a wait to the previous instruction, which is safe unless it deadlocks."""
    if base.program.sharing > 1:
        return None
    waits = base.program.waits
    behind = [n for queue in base.program.queues for n in queue[1:] if waits[n]]
    number = dice.choice(behind)
    queue = next(queue for queue in base.program.queues if number in queue)
    before = queue[queue.index(number) - 1]
    new = changed(changed(waits, before, waits[before] + waits[number]), number, ())
    return f"{before} waits for what {number} does", replace(base.program, waits=new)


def counter_split(base: Base, dice: Random) -> Made:
    """Split a counter in two, which is safe, since each waiter waits for both."""
    program = base.program
    signallers: dict[int, list[int]] = {}
    for number, counters in enumerate(program.signals):
        for counter in counters:
            signallers.setdefault(counter, []).append(number)
    old = dice.choice(sorted(c for c, numbers in signallers.items() if len(numbers) > 1))
    numbers = signallers[old]
    gone = set(dice.sample(numbers, dice.randrange(1, len(numbers))))
    new = program.counters

    def both(wait: Wait) -> tuple[Wait, ...]:
        if wait.counter != old:
            return (wait,)
        part = len(gone) if wait.until else 0
        return Wait(old, wait.until - part), Wait(new, part)

    signals = [
        tuple(new if counter == old and number in gone else counter for counter in counters)
        for number, counters in enumerate(program.signals)
    ]
    waits = tuple(
        tuple(w for wait in instruction_waits for w in both(wait))
        for instruction_waits in program.waits
    )
    description = f"{sorted(gone)} signal {new} instead of {old}"
    return description, replace(program, waits=waits, signals=tuple(signals))


def signal_dropped(base: Base, dice: Random) -> Made:
    """Drop a signal that an instruction waits for."""
    number, counter = _signal(base, dice)
    return _with_signals(base, f"{number} no more signals {counter}", {number: [counter]}, {})


def signal_doubled(base: Base, dice: Random) -> Made:
    """Give a signal twice."""
    number, counter = _signal(base, dice)
    return _with_signals(base, f"{number} signals {counter} twice", {}, {number: [counter]})


def signal_too_early(base: Base, dice: Random) -> Made:
    """Move a signal to an earlier instruction of the queue, before the write."""
    number, counter = _signal(base, dice)
    queue = next(queue for queue in base.program.queues if number in queue)
    earlier = queue[: queue.index(number)]
    if not earlier:
        return None
    other = dice.choice(earlier[-3:])
    description = f"{other} gives the signal {counter} of {number}"
    return _with_signals(base, description, {number: [counter]}, {other: [counter]})


def signal_by_another(base: Base, dice: Random) -> Made:
    """Move a signal to any other instruction."""
    number, counter = _signal(base, dice)
    other = dice.randrange(len(base.program.instructions))
    description = f"{other} gives the signal {counter} of {number}"
    return _with_signals(base, description, {number: [counter]}, {other: [counter]})


def _signal(base: Base, dice: Random) -> tuple[int, int]:
    signals = base.program.signals
    return dice.choice([(n, counter) for n, counters in enumerate(signals) for counter in counters])


def _with_signals(
    base: Base, description: str, less: dict[int, list[int]], more: dict[int, list[int]]
) -> Made:
    signals = [list(signalled) for signalled in base.program.signals]
    for number, counters in less.items():
        for counter in counters:
            signals[number].remove(counter)
    for number, counters in more.items():
        signals[number] += counters
    return description, replace(base.program, signals=tuple(map(tuple, signals)))


def counter_shared(base: Base, dice: Random) -> Made:
    """Merge two counters without changing thresholds."""
    target, gone = dice.sample(range(base.program.counters), 2)
    return f"counter {gone} is counter {target}", shared(base.program, target, gone)


def shared(program: Program, target: int, gone: int) -> Program:
    def moved(counter: int) -> int:
        return target if counter == gone else counter

    return replace(
        program,
        waits=tuple(
            tuple(Wait(moved(w.counter), w.until) for w in waits) for waits in program.waits
        ),
        signals=tuple(tuple(map(moved, counters)) for counters in program.signals),
    )


def queue_order_swapped(base: Base, dice: Random) -> Made:
    """Swap two nearby instructions of a queue."""
    queues = base.program.queues
    place = dice.choice([place for place, queue in enumerate(queues) if len(queue) > 1])
    queue: list[Any] = list(queues[place])
    first = dice.randrange(len(queue) - 1)
    other = min(len(queue) - 1, first + dice.choice([1, 1, 2, 4]))
    queue[first], queue[other] = queue[other], queue[first]
    description = f"queue {place} runs {queue[first]} before {queue[other]}"
    return description, replace(base.program, queues=changed(queues, place, tuple(queue)))


def queue_changed(base: Base, dice: Random) -> Made:
    """Move an instruction to another worker of its rank, in program order."""
    program = base.program
    workers = len(program.queues) // program.ranks
    if workers == 1:
        return None
    number = dice.randrange(len(program.instructions))
    old = queue_by_instruction(program.queues)[number]
    first = old // workers * workers
    new = dice.choice([place for place in range(first, first + workers) if place != old])
    return _moved(program, number, new)


def rank_changed(base: Base, dice: Random) -> Made:
    """Move an instruction to a worker of another rank."""
    program = base.program
    if program.ranks == 1:
        return None
    number = dice.randrange(len(program.instructions))
    workers = len(program.queues) // program.ranks
    candidates = [p for p in range(len(program.queues)) if p // workers != base.steps[number].rank]
    return _moved(program, number, dice.choice(candidates))


def _moved(program: Program, number: int, new: int) -> Made:
    queues = [[n for n in queue if n != number] for queue in program.queues]
    index = sum(n < number for n in queues[new])
    queues[new].insert(index, number)
    description = f"{number} is in queue {new}"
    return description, replace(program, queues=tuple(map(tuple, queues)))


def workers_added(base: Base, dice: Random) -> Made:
    """Let several workers share queues whose order the program relies on."""
    if base.program.sharing > 1:
        return None
    sharing = dice.randrange(2, 9)
    return f"{sharing} workers a queue", replace(base.program, sharing=sharing)


ORDERS = (
    wait_dropped,
    threshold_lowered,
    threshold_raised,
    step_wait_dropped,
    wait_added,
    wait_too_early,
    counter_split,
    signal_dropped,
    signal_doubled,
    signal_too_early,
    signal_by_another,
    counter_shared,
    queue_order_swapped,
    queue_changed,
    rank_changed,
    workers_added,
)
