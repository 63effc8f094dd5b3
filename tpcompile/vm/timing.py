"""When everything runs: the simulated clock of a program's workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.vm.execution import run_all
from tpcompile.vm.program import Program, Wait, worker_by_instruction


@dataclass(frozen=True)
class Timing:
    """Start and finish of every instruction, and what that comes to."""

    starts: tuple[float, ...]
    finishes: tuple[float, ...]
    idle: tuple[float, ...]
    """The time that each worker has nothing to do before the program is over."""

    @property
    def makespan(self) -> float:
        return max(self.finishes, default=0.0)


def timing(program: Program, costs: Sequence[float]) -> Timing:
    """The clock of a program that ends, and that waits for all signals of a counter or for none.

    Each instruction starts when its worker is free and its waits are over.
    """
    order: list[int] = []
    run_all(program, order.append)
    worker_of = worker_by_instruction(program.queues)
    free = [0.0] * len(program.queues)
    raised: list[list[float]] = [[] for _ in range(program.counters)]
    over: dict[Wait, float] = {}
    starts, finishes = [0.0] * len(order), [0.0] * len(order)
    for number in order:
        for wait in program.waits[number]:
            if wait not in over:
                over[wait] = max(raised[wait.counter], default=0.0)
        begin = max([free[worker_of[number]], *(over[w] for w in program.waits[number])])
        starts[number] = begin
        finishes[number] = free[worker_of[number]] = begin + costs[number]
        for counter in program.signals[number]:
            raised[counter].append(finishes[number])
    end = max(finishes, default=0.0)
    busy = [sum(costs[number] for number in queue) for queue in program.queues]
    return Timing(tuple(starts), tuple(finishes), tuple(end - time for time in busy))
