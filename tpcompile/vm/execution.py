"""Which instructions can run: counters only rise, so it does not matter who is first."""

from __future__ import annotations

from collections.abc import Callable

from tpcompile.vm.program import Program


def run_all(
    program: Program,
    visit: Callable[[int], None] = lambda number: None,
    without: int | None = None,
) -> list[int]:
    """Run what can be run, and never `without`; the instructions left over, the first of each
    queue that is stuck first.

    Every worker goes as far as it can. What has run in the end is what any order would come to,
    and all that an adversary who holds `without` back can bring about.
    """
    counts = [0] * program.counters
    place = [0] * len(program.queues)
    sleeping: dict[int, list[int]] = {}
    awake = list(range(len(program.queues)))
    while awake:
        worker = awake.pop()
        queue = program.queues[worker]
        while place[worker] < len(queue):
            number = queue[place[worker]]
            unmet = next((w for w in program.waits[number] if counts[w.counter] < w.until), None)
            if number == without:
                break
            if unmet is not None:
                sleeping.setdefault(unmet.counter, []).append(worker)
                break
            visit(number)
            place[worker] += 1
            for counter in program.signals[number]:
                counts[counter] += 1
                awake += sleeping.pop(counter, [])
    stuck = [queue[place[worker] :] for worker, queue in enumerate(program.queues)]
    heads = [rest[0] for rest in stuck if rest]
    return heads + [number for rest in stuck for number in rest[1:]]
