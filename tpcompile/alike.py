"""Equal layers, and their repetition.

Each view of a model (its modules, its text, its program) has a key for a layer, without the number
of the layer and the names of its weights and buffers. Layers with equal keys are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def layers_by_key(pairs: Iterable[tuple[int, K]]) -> dict[K, list[int]]:
    """Return the layers of each kind, given each layer with its key."""
    layers: dict[K, list[int]] = {}
    for layer, key in pairs:
        layers.setdefault(key, []).append(layer)
    return layers


def kinds_of(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Return the kind of each layer; kinds are numbered in the order in which they appear."""
    known: dict[Hashable, int] = {}
    return tuple([known.setdefault(key, len(known)) for key in keys])


def runs_of(numbers: Iterable[int]) -> list[range]:
    """Return the runs of consecutive numbers, given numbers in ascending order."""
    groups = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    runs = ([number for _, number in group] for _, group in groups)
    return [range(run[0], run[-1] + 1) for run in runs]


def texts_of_runs(numbers: Iterable[int], between: str) -> list[str]:
    """Return each run of consecutive numbers as text, such as `0..27` with `..` between."""
    return [
        f"{run[0]}{between}{run[-1]}" if len(run) > 1 else str(run[0])
        for run in runs_of(sorted(numbers))
    ]


@dataclass(frozen=True)
class Repeat:
    """Layers from `start` on in which the same `period` kinds come `count` times in turn."""

    start: int
    period: int
    count: int


def repeat_of(kinds: Sequence[int], kept_periods: int) -> Repeat | None:
    """Return the repeat that has the most layers beyond `kept_periods`, None if none has any."""
    best, most = None, 0
    for period in range(1, len(kinds) // (kept_periods + 1) + 1):
        same = (a == b for a, b in zip(kinds, kinds[period:], strict=False))
        for equal in runs_of(layer for layer, is_same in enumerate(same) if is_same):
            count = (len(equal) + period) // period
            if (count - kept_periods) * period > most:
                most = (count - kept_periods) * period
                best = Repeat(equal.stop + period - count * period, period, count)
    return best
