"""The busy workers over time, by kind of instruction, as one strip of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from tpcompile.inspect import svg
from tpcompile.inspect.colours import colour_of
from tpcompile.inspect.timeline import Timeline

_BINS = 600

Strip = tuple[float, float, float, float]
"""Left, top, width and height."""


def occupancy(
    timeline: Timeline, tracks: Sequence[int], kinds: Iterable[str], strip: Strip
) -> Iterator[str]:
    """Yield stacked areas, one per kind of instruction. White space is idle time."""
    left, top, width, height = strip
    yield svg.box(left, top, width, height, f'stroke="{svg.GRID}"', fill="none")
    shares = busy_shares(timeline, tracks, kinds)
    stacked = [0.0] * _BINS
    areas: list[str] = []
    for kind, share in shares.items():
        stacked = [below + busy for below, busy in zip(stacked, share, strict=True)]
        if any(share):
            heights = [min(part, 1.0) * height for part in stacked]
            areas.append(_area(heights, left, top + height, width / _BINS, colour_of(kind)))
    yield from reversed(areas)  # tallest first: each area is drawn over the taller ones


def busy_shares(
    timeline: Timeline, tracks: Sequence[int], kinds: Iterable[str]
) -> dict[str, list[float]]:
    """Return the share of these workers' time that each kind takes, per interval of time."""
    timing = timeline.timing
    piece = timing.makespan / _BINS
    shares = {kind: Means(piece, _BINS) for kind in kinds}
    if piece and tracks:
        for number in (number for track in tracks for number in timeline.rows[track]):
            share = shares[timeline.program.instructions[number].name]
            share.add(timing.starts[number], timing.finishes[number], 1 / len(tracks))
    return {kind: share.values for kind, share in shares.items()}


class Means:
    """The means of a sum of rates over `count` intervals, each of the length `piece`."""

    def __init__(self, piece: float, count: int) -> None:
        self._piece, self._count = piece, count
        self._steps, self._rests = [0.0] * (count + 1), [0.0] * count

    def add(self, start: float, finish: float, rate: float) -> None:
        """Add a rate from `start` to `finish`, which are in the intervals."""
        for moment, change in ((start, rate), (finish, -rate)):
            place = min(int(moment / self._piece), self._count - 1)
            self._rests[place] += change * ((place + 1) * self._piece - moment)
            self._steps[place + 1] += change

    @property
    def values(self) -> list[float]:
        """The mean over each interval."""
        levels = accumulate(self._steps[: self._count])
        return [
            level + remainder / self._piece if remainder else level
            for level, remainder in zip(levels, self._rests, strict=True)
        ]


def _area(heights: Sequence[float], left: float, bottom: float, step: float, colour: str) -> str:
    path = [f"M{left:.1f} {bottom:.1f}"]
    drawn = 0.0
    for place, height in enumerate(heights):
        if abs(height - drawn) >= 0.05:
            path.append(f"V{bottom - height:.1f}")
            drawn = height
        path.append(f"H{left + (place + 1) * step:.1f}")
    return f'<path d="{"".join(path)}V{bottom:.1f}Z" fill="{colour}"/>'
