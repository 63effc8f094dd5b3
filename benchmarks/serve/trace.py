"""Requests as they arrive at a server, drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

_SPREAD = 0.6
"""The spread of the logarithm of lengths."""


@dataclass(frozen=True)
class Load:
    """What arrives: Poisson arrivals, and lengths that are spread around a median."""

    requests: int = 10_000
    per_s: float = 2.0
    prompt: int = 128
    """The median number of tokens of a prompt, without the prefix."""
    new: int = 64
    """The median number of new tokens."""
    prefix: int = 0
    """The tokens of a prefix that requests of a group share."""
    groups: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    tokens: list[int]
    new: int


def arrivals(load: Load, longest: int) -> Iterator[Arrival]:
    """Yield the requests of a trace in order; none has more than `longest` tokens in all."""
    dice, now = Random(load.seed), 0.0
    prefixes = [
        [dice.randrange(1, 1000) for _ in range(load.prefix)] for _ in range(max(1, load.groups))
    ]
    for _ in range(load.requests):
        now += dice.expovariate(load.per_s)
        prefix = dice.choice(prefixes)
        room = longest - len(prefix)
        length = min(room - 1, _drawn(dice, load.prompt))
        tokens = prefix + [dice.randrange(1, 1000) for _ in range(length)]
        yield Arrival(now, tokens, min(longest - len(tokens), _drawn(dice, load.new)))


def _drawn(dice: Random, median: int) -> int:
    return max(1, round(median * math.exp(dice.gauss(0, _SPREAD))))
