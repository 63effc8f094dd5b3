"""The simulated clock of a program's workers: when each instruction starts and finishes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program


@dataclass(frozen=True)
class Timing:
    """The start, finish and worker of every instruction, and the idle time of every worker."""

    starts: tuple[float, ...]
    finishes: tuple[float, ...]
    idle: tuple[float, ...]
    """The idle time of each worker until the program ends."""
    workers: tuple[int, ...] = ()
    """The worker of each instruction. Workers are numbered queue by queue, so those that share the
    first queue come first."""

    @property
    def makespan(self) -> float:
        return max(self.finishes, default=0.0)


def timing(program: Program, costs: Sequence[float]) -> Timing:
    """Simulate one step of a program. Raise `VerifyError` if it deadlocks.

    A worker takes the next instruction of its queue when it is free, and starts it when its waits
    are met.
    """
    clock = _Clock(program, costs)
    clock.run()
    end = max(clock.finishes, default=0.0)
    idle = tuple(end - time for time in clock.busy)
    return Timing(tuple(clock.starts), tuple(clock.finishes), idle, tuple(clock.workers))


class _Clock:
    """The state of the simulation, which advances from one finish to the next."""

    def __init__(self, program: Program, costs: Sequence[float]) -> None:
        count = len(program.instructions)
        self.starts, self.finishes, self.workers = [0.0] * count, [0.0] * count, [0] * count
        self.busy = [0.0] * (len(program.queues) * program.sharing)
        self._program, self._costs = program, costs
        self._taken = [0] * len(program.queues)
        self._counts = [0] * program.counters
        self._waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By counter and the value that it must reach: waiting workers and their instructions."""
        self._running: list[tuple[float, int, int]] = []
        self._started = 0

    def run(self) -> None:
        for worker in range(len(self.busy)):
            self._take(worker, 0.0)
        while self._running:
            now, worker, number = heapq.heappop(self._running)
            for counter in self._program.signals[number]:
                self._counts[counter] += 1
                for waiting in self._waiting.pop((counter, self._counts[counter]), ()):
                    self._start(*waiting, now)
            self._take(worker, now)
        if self._started < len(self.starts):
            raise VerifyError(
                "The program cannot be simulated, because it deadlocks",
                got=f"{self._started} of {len(self.starts)} instructions started",
            )

    def _take(self, worker: int, now: float) -> None:
        place = worker // self._program.sharing
        queue = self._program.queues[place]
        if self._taken[place] < len(queue):
            number = queue[self._taken[place]]
            self._taken[place] += 1
            self._start(worker, number, now)

    def _start(self, worker: int, number: int, now: float) -> None:
        """Start the instruction now, or try again when its first unmet wait is met."""
        for wait in self._program.waits[number]:
            if self._counts[wait.counter] < wait.until:
                self._waiting.setdefault(wait, []).append((worker, number))
                return
        cost = self._costs[number]
        self._started += 1
        self.starts[number], self.finishes[number] = now, now + cost
        self.workers[number] = worker
        self.busy[worker] += cost
        heapq.heappush(self._running, (now + cost, worker, number))
