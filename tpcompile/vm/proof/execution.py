"""Which instructions can run: counters only rise, so it does not matter who is first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpcompile.vm.program import Program, Wait


def run_order(program: Program, held: int | None = None, apart: bool = False) -> Iterator[int]:
    """The instructions that can run, each worker going as far as it can; not those that never can.

    What comes in the end is what any order would come to. What comes before `held`, which runs
    only when nothing else can, is all that an adversary can let overtake it. `apart` gives each
    instruction a worker for itself: no more can take from the queues.
    """
    queues = [(n,) for queue in program.queues for n in queue] if apart else program.queues
    counts = [0] * program.counters
    place = [0] * len(queues)
    sleeping: dict[tuple[int, int], list[int]] = {}
    """By counter and what it must come to."""
    awake = list(reversed(range(len(queues))))
    holder: list[int] = []
    while awake or holder:
        worker = awake.pop() if awake else holder.pop()
        queue = queues[worker]
        while place[worker] < len(queue):
            number = queue[place[worker]]
            unmet = _unmet(program.waits[number], counts)
            if unmet is not None:
                sleeping.setdefault(unmet, []).append(worker)
                break
            if number == held and awake:
                holder.append(worker)
                break
            yield number
            place[worker] += 1
            for counter in program.signals[number]:
                counts[counter] += 1
                awake += sleeping.pop((counter, counts[counter]), ())


def _unmet(waits: Sequence[Wait], counts: list[int]) -> Wait | None:
    for wait in waits:
        if counts[wait.counter] < wait.until:
            return wait
    return None


def unrolled(program: Program, steps: int) -> Program:
    """The same for a number of steps, one after the other, without repeating."""
    raised = [len(own) for own in program.signallers]
    count = len(program.instructions)
    return replace(
        program,
        instructions=program.instructions * steps,
        queues=tuple(
            tuple(step * count + number for step in range(steps) for number in queue)
            for queue in program.queues
        ),
        waits=tuple(
            tuple(Wait(w.counter, w.until + step * raised[w.counter]) for w in own)
            for step in range(steps)
            for own in program.waits
        ),
        signals=program.signals * steps,
        repeats=False,
    )
