"""The number of guesses that maximizes tokens per second."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from tpcompile.runtime.ranks.step import size_for

_FORGETTING = 0.1
"""The weight of the latest guess in the rate of right ones."""
_LATEST = 0.2
"""The weight of the latest step in the time of a step."""
_WORTH = 1.01
"""The least gain for which tokens are guessed."""
_PER_ROW = 0.02
"""The time of a further row, relative to a step, as long as it was not measured."""


class Rate:
    """The probability that a guess is accepted if all guesses before it are."""

    def __init__(self, value: float) -> None:
        """Begin with an expected value, which counts like two guesses."""
        self.value, self._count = value, 2

    def add(self, right: int, wrong: bool) -> None:
        """Count guesses: so many right ones, and then a wrong one if there was one."""
        for outcome in (*[1.0] * right, *[0.0] * wrong):
            self._count += 1
            self.value += max(_FORGETTING, 1 / self._count) * (outcome - self.value)


class Times:
    """The times of steps by number of rows, which `size_for` rounds up."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        self._begun: set[int] = set()

    def add(self, rows: int, seconds: float) -> None:
        """Count a step. The first one with so many rows made its program, and is left out."""
        size = size_for(rows)
        if size not in self._begun:
            self._begun.add(size)
            return
        before = self._measured.setdefault(size, seconds)
        self._measured[size] += _LATEST * (seconds - before)

    def of(self, rows: int) -> float:
        """Return the expected time of a step; without measurements, relative to one row.

        It is bounded by the times of fewer and of more rows.
        """
        size = size_for(rows)
        if size in self._measured:
            return self._measured[size]
        known = self._measured.items()
        rates = [seconds / _expected(other) for other, seconds in known]
        expected = _expected(size) * (sum(rates) / len(rates) if rates else 1.0)
        least = max((seconds for other, seconds in known if other < size), default=0.0)
        most = min((seconds for other, seconds in known if other > size), default=math.inf)
        return min(max(expected, least), most)


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
    seconds = [times.of(rows) for rows in range(count, max(count, most_rows) + 1)]
    best, best_speed = [0] * count, _WORTH * count / seconds[0] if count else 0.0
    longest = max(most, default=0)
    for limit in range(1, longest + 1) if per_guess else (longest,):
        limits = [min(limit, each) for each in most]
        for rows, (counts, tokens) in enumerate(_by_gain(rates, limits, most_rows - count), 1):
            speed = tokens / (seconds[rows] + per_guess * max(counts))
            if speed > best_speed:
                best, best_speed = counts, speed
    return best


def _by_gain(
    rates: Sequence[float], most: Sequence[int], guesses: int
) -> Iterator[tuple[list[int], float]]:
    """Yield the numbers of guesses for 1, 2, … guesses in all, and the expected tokens.

    Each further guess is the one that is accepted most probably.
    """
    counts, tokens = [0] * len(rates), float(len(rates))
    gains = [(-rate, place) for place, rate in enumerate(rates) if most[place]]
    heapq.heapify(gains)
    for _ in range(guesses):
        if not gains:
            return
        gain, place = heapq.heappop(gains)
        counts = [*counts[:place], counts[place] + 1, *counts[place + 1 :]]
        tokens -= gain
        if counts[place] < most[place]:
            heapq.heappush(gains, (gain * rates[place], place))
        yield counts, tokens
