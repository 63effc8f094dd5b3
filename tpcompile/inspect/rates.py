"""The bytes per µs and the busy workers of a step over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.inspect.bandwidth import traffic_of
from tpcompile.inspect.occupancy import Means
from tpcompile.inspect.timeline import Timeline

BINS = 1000
"""The maximum number of intervals."""


@dataclass(frozen=True)
class Rates:
    """Means over intervals of equal length, which fill the makespan."""

    piece_us: float
    """The length of an interval."""
    bytes_per_us: Sequence[float]
    """The loads of weights and cache. An instruction's are spread evenly over its time."""
    busy: Sequence[float]
    """The workers that run an instruction."""


def rates_of(timeline: Timeline, tracks: Sequence[int], bins: int = BINS) -> Rates:
    """Return the rates of some workers."""
    timing = timeline.timing
    piece = timing.makespan / bins
    loaded, busy = Means(piece, bins), Means(piece, bins)
    for number in (number for track in tracks for number in timeline.rows[track]):
        start, finish = timing.starts[number], timing.finishes[number]
        if finish > start:
            busy.add(start, finish, 1.0)
            traffic = traffic_of(timeline.program.instructions[number])
            loaded.add(start, finish, traffic / (finish - start))
    return Rates(piece, loaded.values, busy.values)
