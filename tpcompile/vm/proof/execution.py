"""The execution order of a program, up to a deadlock if it has one.

Counters only rise, so every order runs the same instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpcompile.vm.program import Program, Wait


def run_order(program: Program, held: int | None = None, apart: bool = False) -> Iterator[int]:
    """Yield the instructions that can run, each worker advancing as far as it can.

    Instructions that can never run are left out; any other order would yield the same set. `held`
    runs only when nothing else can, so the instructions before it are all those that an adversary
    can let overtake it. `apart` gives each instruction a worker of its own, the largest number
    of workers that can take from the queues.
    """
    queues = [(n,) for queue in program.queues for n in queue] if apart else program.queues
    counts = [0] * program.counters
    place = [0] * len(queues)
    sleeping: dict[tuple[int, int], list[int]] = {}
    """Waiting workers, by counter and the value that it must reach."""
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
    """Return a program that runs this many steps one after the other and does not repeat."""
    raised = [len(signallers) for signallers in program.signallers]
    count = len(program.instructions)
    return replace(
        program,
        instructions=program.instructions * steps,
        queues=tuple(
            tuple(step * count + number for step in range(steps) for number in queue)
            for queue in program.queues
        ),
        waits=tuple(
            tuple(Wait(w.counter, w.until + step * raised[w.counter]) for w in waits)
            for step in range(steps)
            for waits in program.waits
        ),
        signals=program.signals * steps,
        repeats=False,
    )
