"""The simulated clock of a program's workers: when each instruction starts and finishes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

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

    @property
    def makespan(self) -> float:
        return max(self.finishes, default=0.0)

    @property
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
        return timing(program, [one.total(target.worker_bytes_per_us) for one in parts])
    return _simulated(program, parts, target.bytes_per_us, target.most_bytes_per_us)


def _simulated(program: Program, parts: Sequence[Parts], together: float, alone: float) -> Timing:
    clock = _Clock(program, parts, together, alone)
    clock.run()
    end = max(clock.finishes, default=0.0)
    idle = tuple(end - time for time in clock.busy)
    return Timing(tuple(clock.starts), tuple(clock.finishes), idle, tuple(clock.workers))


class _Event(NamedTuple):
    """The moment at which a worker has finished an instruction, or begins to load for it."""

    time: float
    worker: int
    number: int
    loads: bool = False


class _Memory:
    """The memory of a rank. All loads that are under way get the same share of its bandwidth.

    So each load ends when `read`, the bytes that one load reading since the start would have got,
    has grown by its size.
    """

    def __init__(self, together: float, alone: float) -> None:
        self._together, self._alone = together, alone
        self._read, self._since = 0.0, 0.0
        self._loads: list[tuple[float, int, int]] = []
        """By the value of `read` at which each ends: the worker and its instruction."""

    @property
    def _rate(self) -> float:
        return min(self._alone, self._together / max(1, len(self._loads)))

    @property
    def next_end(self) -> float:
        """The moment at which the next load ends if no other one begins."""
        if not self._loads:
            return inf
        return self._since + max(0.0, self._loads[0][0] - self._read) / self._rate

    def begin(self, worker: int, number: int, size: float, now: float) -> None:
        self._advance(now)
        heapq.heappush(self._loads, (self._read + size, worker, number))

    def end(self, now: float) -> tuple[int, int]:
        """End the next load; return its worker and instruction."""
        self._advance(now)
        _, worker, number = heapq.heappop(self._loads)
        return worker, number

    def _advance(self, now: float) -> None:
        self._read += (now - self._since) * self._rate if self._loads else 0.0
        self._since = now


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
        self._per_rank = max(1, len(self.busy) // program.ranks)
        self._taken = [0] * len(program.queues)
        self._counts = [0] * program.counters
        self._waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By counter and the value that it must reach: waiting workers and their instructions."""
        self._events: list[_Event] = []
        self._started = 0

    def run(self) -> None:
        for worker in range(len(self.busy)):
            self._take(worker, 0.0)
        while True:
            memory = min(self._memories, key=lambda one: one.next_end)
            loaded = memory.next_end
            if self._events and self._events[0].time <= loaded:
                self._handle(heapq.heappop(self._events))
            elif loaded < inf:
                worker, number = memory.end(loaded)
                computed = self.starts[number] + self._parts[number].fixed_us
                computed += self._parts[number].work_us
                heapq.heappush(self._events, _Event(max(loaded, computed), worker, number))
            else:
                break
        if self._started < len(self.starts):
            raise VerifyError(
                "The program cannot be simulated, because it deadlocks",
                got=f"{self._started} of {len(self.starts)} instructions started",
            )

    def _handle(self, event: _Event) -> None:
        now, worker, number, loads = event
        if loads:
            memory = self._memories[worker // self._per_rank]
            memory.begin(worker, number, self._parts[number].traffic, now)
            return
        self.finishes[number] = now
        self.busy[worker] += now - self.starts[number]
        for counter in self._program.signals[number]:
            self._counts[counter] += 1
            for waiting in self._waiting.pop((counter, self._counts[counter]), ()):
                self._start(*waiting, now)
        self._take(worker, now)

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
        parts = self._parts[number]
        self._started += 1
        self.starts[number], self.workers[number] = now, worker
        then = now + parts.fixed_us + (0.0 if parts.traffic else parts.work_us)
        heapq.heappush(self._events, _Event(then, worker, number, bool(parts.traffic)))
