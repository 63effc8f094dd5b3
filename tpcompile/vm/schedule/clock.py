"""The simulated clock of a program's workers: when each instruction starts and finishes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.targets import Target


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

    @cached_property
    def makespan(self) -> float:
        return max(self.finishes, default=0.0)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The time of each instruction."""
        return tuple(b - a for a, b in zip(self.starts, self.finishes, strict=True))


def timing(program: Program, costs: Sequence[float]) -> Timing:
    """Simulate one step whose instructions take these times. Raise `VerifyError` on a deadlock.

    A worker takes the next instruction of its queue when it is free, and starts it when its waits
    are met.
    """
    return _simulated(program, [Parts(us, 0, 0.0) for us in costs], inf, inf)


def timing_on(program: Program, parts: Sequence[Parts], target: Target) -> Timing:
    """Simulate one step on a target. Raise `VerifyError` on a deadlock.

    The workers of a rank that are loading share its bandwidth: if few load, each is faster, up to
    the bandwidth of a worker alone.
    """
    if target.most_bytes_per_us == target.worker_bytes_per_us:
        return timing(program, [part.total(target.worker_bytes_per_us) for part in parts])
    return _simulated(program, parts, target.bytes_per_us, target.most_bytes_per_us)


def _simulated(program: Program, parts: Sequence[Parts], together: float, alone: float) -> Timing:
    clock = _Clock(program, parts, together, alone)
    clock.run()
    end = max(clock.finishes, default=0.0)
    idle = tuple(end - time for time in clock.busy)
    return Timing(tuple(clock.starts), tuple(clock.finishes), idle, tuple(clock.workers))


_Event = tuple[float, int, int, bool]
"""A time, a worker, an instruction, and whether it begins its load (True) or is done (False)."""


class _Memory:
    """The memory of a rank. All loads in flight get the same share of its bandwidth.

    So each load ends when `read`, the bytes that one load reading since the start would have got,
    has grown by its size.
    """

    def __init__(self, together: float, alone: float) -> None:
        self._together, self._alone = together, alone
        self._read, self._since = 0.0, 0.0
        self._rate = alone
        self._loads: list[tuple[float, int, int]] = []
        """By the value of `read` at which each ends: the worker and its instruction."""

    def begin(self, worker: int, number: int, size: float, now: float) -> float:
        """Begin a load. Return the moment at which the next load ends if no other one begins."""
        self._advance(now)
        heapq.heappush(self._loads, (self._read + size, worker, number))
        return self._next_end()

    def end(self, now: float) -> tuple[int, int, float]:
        """End the next load; return its worker, its instruction, and when the one after it ends."""
        self._advance(now)
        _, worker, number = heapq.heappop(self._loads)
        return worker, number, self._next_end()

    def _advance(self, now: float) -> None:
        if self._loads:
            self._read += (now - self._since) * self._rate
        self._since = now

    def _next_end(self) -> float:
        loads = self._loads
        if not loads:
            self._rate = self._alone
            return inf
        rate = self._rate = min(self._alone, self._together / len(loads))
        return self._since + max(0.0, loads[0][0] - self._read) / rate


class _Clock:
    """The state of the simulation, which advances from one event to the next."""

    def __init__(
        self, program: Program, parts: Sequence[Parts], together: float, alone: float
    ) -> None:
        count = len(program.instructions)
        self.starts, self.finishes, self.workers = [0.0] * count, [0.0] * count, [0] * count
        self.busy = [0.0] * (len(program.queues) * program.sharing)
        self._program, self._parts = program, parts
        self._memories = [_Memory(together, alone) for _ in range(program.ranks)]
        self._loaded = [inf] * program.ranks
        """By rank, the moment at which the next load ends if no other one begins."""
        self._per_rank = max(1, len(self.busy) // program.ranks)
        self._left = [iter(queue) for queue in program.queues]
        """By queue, the instructions that no worker has taken."""
        self._counts = [0] * program.counters
        self._waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By counter and the value that it must reach: waiting workers and their instructions."""
        self._events: list[_Event] = []
        self._started = 0

    def run(self) -> None:
        for worker in range(len(self.busy)):
            self._take(worker, 0.0)
        events, ends = self._events, self._loaded
        while True:
            loaded = min(ends)  # the first rank's, of several
            if events and events[0][0] <= loaded:
                now, worker, number, loads = heapq.heappop(events)
                if loads:
                    rank, size = worker // self._per_rank, self._parts[number].traffic
                    ends[rank] = self._memories[rank].begin(worker, number, size, now)
                else:
                    self._finish(worker, number, now)
            elif loaded < inf:
                rank = ends.index(loaded)
                worker, number, ends[rank] = self._memories[rank].end(loaded)
                fixed, _, work = self._parts[number]
                computed = self.starts[number] + fixed + work
                heapq.heappush(events, (max(loaded, computed), worker, number, False))
            else:
                break
        if self._started < len(self.starts):
            raise VerifyError(
                "The program cannot be simulated, because it deadlocks",
                got=f"{self._started} of {len(self.starts)} instructions started",
            )

    def _finish(self, worker: int, number: int, now: float) -> None:
        self.finishes[number] = now
        self.busy[worker] += now - self.starts[number]
        counts, waiting = self._counts, self._waiting
        for counter in self._program.signals[number]:
            reached = counts[counter] = counts[counter] + 1
            if (counter, reached) in waiting:
                for other, behind in waiting.pop((counter, reached)):
                    self._start(other, behind, now)
        self._take(worker, now)

    def _take(self, worker: int, now: float) -> None:
        number = next(self._left[worker // self._program.sharing], None)
        if number is not None:
            self._start(worker, number, now)

    def _start(self, worker: int, number: int, now: float) -> None:
        """Start the instruction now, or try again when its first unmet wait is met."""
        counts = self._counts
        for wait in self._program.waits[number]:
            counter, until = wait
            if counts[counter] < until:
                self._waiting.setdefault(wait, []).append((worker, number))
                return
        fixed, traffic, work = self._parts[number]
        self._started += 1
        self.starts[number], self.workers[number] = now, worker
        then = now + fixed + (0.0 if traffic else work)
        heapq.heappush(self._events, (then, worker, number, bool(traffic)))
