"""The busy workers over time, by kind of instruction, as one strip of a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.inspect import svg
from tpcompile.inspect.timeline import Timeline

_BINS = 600

Strip = tuple[float, float, float, float]
"""Left, top, width and height."""


def occupancy(
    timeline: Timeline, tracks: Sequence[int], paint: dict[str, str], strip: Strip
) -> Iterator[str]:
    """Yield stacked areas, one per kind of instruction. White space is idle time."""
    left, top, width, height = strip
    yield svg.box(left, top, width, height, f'stroke="{svg.GRID}"', fill="none")
    shares = busy_shares(timeline, tracks, list(paint))
    stacked = [0.0] * _BINS
    areas: list[str] = []
    for kind, share in shares.items():
        stacked = [below + own for below, own in zip(stacked, share, strict=True)]
        if any(share):
            heights = [min(part, 1.0) * height for part in stacked]
            areas.append(_area(heights, left, top + height, width / _BINS, paint[kind]))
    yield from reversed(areas)  # tallest first: each area is drawn over the taller ones


def busy_shares(
    timeline: Timeline, tracks: Sequence[int], kinds: Sequence[str]
) -> dict[str, list[float]]:
    """Return the share of these workers' time that each kind takes, per interval of time."""
    timing = timeline.timing
    piece = timing.makespan / _BINS
    shares = {kind: [0.0] * _BINS for kind in kinds}
    if not piece or not tracks:
        return shares
    unit = 1 / (piece * len(tracks))
    for number in (number for track in tracks for number in timeline.rows[track]):
        share = shares[timeline.program.instructions[number].name]
        start, finish = timing.starts[number], timing.finishes[number]
        last = min(int(finish / piece), _BINS - 1)
        for place in range(min(int(start / piece), last), last + 1):
            inside = min(finish, (place + 1) * piece) - max(start, place * piece)
            share[place] += max(inside, 0.0) * unit
    return shares


def _area(heights: Sequence[float], left: float, bottom: float, step: float, colour: str) -> str:
    path = [f"M{left:.1f} {bottom:.1f}"]
    drawn = 0.0
    for place, height in enumerate(heights):
        if abs(height - drawn) >= 0.05:
            path.append(f"V{bottom - height:.1f}")
            drawn = height
        path.append(f"H{left + (place + 1) * step:.1f}")
    return f'<path d="{"".join(path)}V{bottom:.1f}Z" fill="{colour}"/>'
