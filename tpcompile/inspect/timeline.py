"""A timed program: the instructions of each worker by time, and the signal that released each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tpcompile.vm.program import Instruction, Program
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
        workers = count // self.program.ranks
        return tuple(Track(*divmod(number, workers)) for number in range(count))

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The instructions of each track, ordered by time."""
        by_time = np.lexsort((self.timing.finishes, self.timing.starts))
        rows: list[list[int]] = [[] for _ in self.tracks]
        for number in by_time.tolist():
            rows[self.timing.workers[number]].append(number)
        return tuple(map(tuple, rows))

    @cached_property
    def released_by(self) -> tuple[int | None, ...]:
        """For each instruction, the one whose signal ended its last wait; None without waits.

        A tie goes to the first instruction, so among ranks that run in lockstep the first rank
        is chosen.
        """
        numbers = np.arange(len(self.program.instructions))
        finished = np.lexsort((-numbers, np.array(self.timing.finishes)))
        place = np.empty_like(numbers)
        place[finished] = numbers
        ended, owners = self._ended(place)
        last = np.full_like(numbers, -1)
        np.maximum.at(last, owners, place[ended])
        releasing = np.where(last < 0, -1, finished[last]).tolist()
        return tuple(None if number < 0 else number for number in releasing)

    def _ended(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the instruction whose signal ends each wait, and the instruction that waits.

        `place` has the place of each instruction in the order of their finishes.
        """
        signals, waits = self.program.signals, self.program.waits
        counters = np.fromiter(chain.from_iterable(signals), np.int64)
        signallers = _owners(signals)
        by_time = np.lexsort((place[signallers], counters))
        first = np.searchsorted(counters[by_time], np.arange(self.program.counters))
        every = np.fromiter(chain.from_iterable(chain.from_iterable(waits)), np.int64)
        counter, until = every.reshape(-1, 2).T
        met = until > 0
        nth = first[counter[met]] + until[met] - 1
        return signallers[by_time[nth]], _owners(waits)[met]

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The critical path: each instruction after the one that let it start, up to the end."""
        before: dict[int, int] = {}
        for row in self.rows:
            before.update(zip(row[1:], row, strict=False))
        finish = self.timing.finishes.__getitem__
        number = max(range(len(self.timing.finishes)), key=finish, default=None)
        path: list[int] = []
        while number is not None:
            path.append(number)
            early = (self.released_by[number], before.get(number))
            number = max((n for n in early if n is not None), key=finish, default=None)
        return tuple(reversed(path))

    @property
    def idle(self) -> float:
        """The fraction of the workers' time that is idle."""
        whole = self.timing.makespan * len(self.tracks)
        return sum(self.timing.idle) / whole if whole else 0.0


def _owners(sequences: Sequence[Sequence[Any]]) -> np.ndarray:
    """Return, for the elements of all sequences one after another, the number of their sequence."""
    return np.repeat(np.arange(len(sequences)), np.fromiter(map(len, sequences), np.int64))


def layer_of(instruction: Instruction) -> int | None:
    """Return the layer of an instruction, or None before the first and after the last layer."""
    layer = getattr(instruction, "layer", None)
    return layer if isinstance(layer, int) and layer >= 0 else None
