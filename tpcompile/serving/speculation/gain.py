"""The number of guesses that maximizes tokens per second."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache

from tpcompile.runtime.ranks.step import ProgramSize, size_for

_FORGETTING = 0.1
"""The weight of the latest guess in the rate of right ones."""
_LATEST = 3
"""The number of latest steps of which the shortest counts."""
_OLD = 128
"""The steps after which a step without guesses is measured again."""
_WORTH = 1.01
"""The least gain for which tokens are guessed."""
_CHANCE = 0.01
"""The least probability of a guess that is considered."""
_PER_ROW = 0.02
"""The time of a further row, relative to a step, until it is measured."""


class Rate:
    """The probability that a guess is accepted if all guesses before it are."""

    def __init__(self, value: float) -> None:
        """Begin with an expected value, which counts like two guesses."""
        self.value, self._count = value, 2

    def add(self, right: int, wrong: bool) -> None:
        """Count guesses: the right ones, and then a wrong one if there was one."""
        for outcome in (*[1.0] * right, *[0.0] * wrong):
            self._count += 1
            self.value += max(_FORGETTING, 1 / self._count) * (outcome - self.value)


class Times:
    """The times of steps by number of rows, which `size_for` rounds up, without and with guesses.

    The shortest of the latest ones counts, since some steps are delayed.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._latest: dict[ProgramSize, deque[float]] = {}
        self._last_steps: dict[ProgramSize, int] = {}
        self._measured: dict[ProgramSize, float] = {}

    def add(self, rows: int, seconds: float, *, guesses: bool) -> None:
        """Count a step. The first step of a program includes its compilation, and is left out."""
        self._steps += 1
        size = _size(rows, guesses)
        times = self._latest.get(size)
        if times is None:
            self._latest[size] = deque(maxlen=_LATEST)
            return
        times.append(seconds)
        self._last_steps[size] = self._steps
        self._measured[size] = min(times)

    def is_due(self, sequences: int) -> bool:
        """Return whether a step of this number of sequences should be measured without guesses."""
        size = _size(sequences, guesses=False)
        return size not in self._measured or self._steps - self._last_steps[size] >= _OLD

    def of(self, rows: int, *, guesses: bool) -> float:
        """Return the expected time of a step.

        Between two measured numbers of rows, it grows evenly; elsewhere, each row adds its share.
        """
        size = _size(rows, guesses)
        if size in self._measured:
            return self._measured[size]
        known: dict[int, float] = {}
        for other, seconds in self._measured.items():
            known[other.batch] = min(seconds, known.get(other.batch, math.inf))
        fewer = max((batch for batch in known if batch <= size.batch), default=None)
        more = min((batch for batch in known if batch >= size.batch), default=None)
        if fewer is None or more is None:
            nearest = more if fewer is None else fewer
            expected = _expected(size.batch)
            return expected if nearest is None else known[nearest] * expected / _expected(nearest)
        part = (size.batch - fewer) / (more - fewer) if more > fewer else 0.0
        return known[fewer] + part * (known[more] - known[fewer])


def _size(rows: int, guesses: bool) -> ProgramSize:
    batch = size_for(rows)
    return ProgramSize(batch, batch if guesses else 1)


def _expected(rows: int) -> float:
    return 1 + _PER_ROW * (rows - 1)


def counts_for(
    rates: Sequence[float], most: Sequence[int], times: Times, most_rows: int, per_guess: float
) -> list[int]:
    """Return the number of guesses for each sequence, given the rates of right ones.

    `most` are the maximum numbers, and `most_rows` is the maximum number of rows. `per_guess` is
    the time to guess one more token of every sequence.
    """
    count = len(rates)
    seconds = cache(lambda rows: times.of(rows, guesses=rows > count))
    best, best_speed = [0] * count, _WORTH * count / seconds(count) if count else 0.0
    longest = max(most, default=0)
    for limit in range(1, longest + 1) if per_guess else (longest,):
        limits = [min(limit, maximum) for maximum in most]
        guesses = _by_gain(rates, limits, most_rows - count)
        for rows, (counts, tokens) in enumerate(guesses, count + 1):
            speed = tokens / (seconds(rows) + per_guess * max(counts))
            if speed > best_speed:
                best, best_speed = counts, speed
    return best


def _by_gain(
    rates: Sequence[float], most: Sequence[int], guesses: int
) -> Iterator[tuple[list[int], float]]:
    """Yield the numbers of guesses for 1, 2, … guesses in all, and the expected tokens.

    Each further guess is the one most likely to be accepted, if it has some chance.
    """
    counts, tokens = [0] * len(rates), float(len(rates))
    gains = [(-rate, place) for place, rate in enumerate(rates) if most[place]]
    heapq.heapify(gains)
    for _ in range(guesses):
        if not gains or -gains[0][0] < _CHANCE:
            return
        gain, place = heapq.heappop(gains)
        counts = [*counts[:place], counts[place] + 1, *counts[place + 1 :]]
        tokens -= gain
        if counts[place] < most[place]:
            heapq.heappush(gains, (gain * rates[place], place))
        yield counts, tokens
