"""A timed program: the instructions of each worker by time, and the signal that released each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tpcompile.vm.program import Instruction, Program, Wait
from tpcompile.vm.schedule.clock import Timing


class Track(NamedTuple):
    """A worker of a rank, both counted from 0."""

    rank: int
    worker: int


@dataclass(frozen=True)
class Timeline:
    """A program and its simulated clock, in µs."""

    program: Program
    timing: Timing

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """The tracks of all workers, rank after rank."""
        count = len(self.timing.idle)
        each = count // self.program.ranks
        return tuple(Track(*divmod(number, each)) for number in range(count))

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The instructions of each track, ordered by time."""
        starts, finishes = self.timing.starts, self.timing.finishes
        found: list[list[int]] = [[] for _ in self.tracks]
        for number in sorted(range(len(starts)), key=lambda n: (starts[n], finishes[n])):
            found[self.timing.workers[number]].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def released_by(self) -> tuple[int | None, ...]:
        """For each instruction, the one whose signal ended its last wait; None without waits.

        A tie goes to the first instruction, so among ranks that run in lockstep the first rank
        is chosen.
        """
        signallers: dict[int, list[int]] = {}
        for number, own in enumerate(self.program.signals):
            for counter in own:
                signallers.setdefault(counter, []).append(number)
        finishes = self.timing.finishes
        ended: dict[Wait, int] = {}

        def moment(number: int) -> tuple[float, int]:
            return finishes[number], -number

        found: list[int | None] = []
        for own_waits in self.program.waits:
            waits = [wait for wait in own_waits if wait.until]
            for wait in waits:
                if wait not in ended:
                    by_time = sorted(signallers[wait.counter], key=moment)
                    ended[wait] = by_time[wait.until - 1]
            found.append(max((ended[wait] for wait in waits), key=moment, default=None))
        return tuple(found)

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The critical path: each instruction after the one that let it start, up to the end."""
        before: dict[int, int] = {}
        for row in self.rows:
            before.update(zip(row[1:], row, strict=False))
        finish = self.timing.finishes.__getitem__
        number = max(range(len(self.timing.finishes)), key=finish, default=None)
        found: list[int] = []
        while number is not None:
            found.append(number)
            early = (self.released_by[number], before.get(number))
            number = max((n for n in early if n is not None), key=finish, default=None)
        return tuple(reversed(found))

    @property
    def idle(self) -> float:
        """The fraction of the workers' time that is idle."""
        whole = self.timing.makespan * len(self.tracks)
        return sum(self.timing.idle) / whole if whole else 0.0


def layer_of(instruction: Instruction) -> int | None:
    """Return the layer of an instruction, or None before the first and after the last layer."""
    layer = getattr(instruction, "layer", None)
    return layer if isinstance(layer, int) and layer >= 0 else None
