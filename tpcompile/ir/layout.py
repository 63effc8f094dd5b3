"""Layouts: which part of a logical axis each rank holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Interval = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A logical axis of `units` units, each `grain` elements wide, distributed over the ranks.

    `parts[rank]` contains the half-open intervals of units that the rank holds, in memory order.
    Parts may be uneven, and may overlap where ranks share units.
    """

    axis: str
    units: int
    grain: int
    parts: tuple[tuple[Interval, ...], ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.axis, self.units, self.grain, self.parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @property
    def size(self) -> int:
        return self.units * self.grain

    def unit_count(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.parts[rank])

    def extent(self, rank: int) -> int:
        return self.unit_count(rank) * self.grain

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """Return the rank's part in elements rather than units."""
        return tuple((start * self.grain, stop * self.grain) for start, stop in self.parts[rank])

    def units_of(self, rank: int) -> list[int]:
        """Return the units that the rank holds, in memory order."""
        return [unit for start, stop in self.parts[rank] for unit in range(start, stop)]

    def with_grain(self, grain: int) -> Layout:
        return Layout(self.axis, self.units, grain, self.parts)

    def refusal(self) -> str | None:
        """Return why the layout is invalid (empty rank, bad interval, missing unit), or None."""
        for rank, part in enumerate(self.parts):
            if not self.unit_count(rank):
                return f"rank {rank} holds no units of {self.axis}"
            if any(not 0 <= start < stop <= self.units for start, stop in part):
                return f"rank {rank} holds {part}, outside the {self.units} units of {self.axis}"
            if any(left[1] > right[0] for left, right in pairwise(part)):
                return f"rank {rank} holds units of {self.axis} twice or out of order: {part}"
        missing = set(range(self.units)).difference(*(self.units_of(r) for r in range(self.ranks)))
        if missing:
            return f"no rank holds {self.axis} unit {min(missing)} ({len(missing)} missing)"
        return None

    def overlap(self) -> str | None:
        """Return why the parts are not disjoint, or None if they are."""
        held = Counter(unit for rank in range(self.ranks) for unit in self.units_of(rank))
        repeated = sum(count > 1 for count in held.values())
        return f"{repeated} units of {self.axis} are on more than one rank" if repeated else None

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True)
class FusedLayout:
    """Several layouts concatenated along one dimension, as in a fused QKV weight."""

    segments: tuple[Layout, ...]

    @property
    def axis(self) -> str:
        return "+".join(segment.axis for segment in self.segments)

    @property
    def ranks(self) -> int:
        return min(segment.ranks for segment in self.segments)

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    def extent(self, rank: int) -> int:
        return sum(segment.extent(rank) for segment in self.segments)

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        intervals: list[Interval] = []
        offset = 0
        for segment in self.segments:
            intervals += [(offset + a, offset + b) for a, b in segment.intervals(rank)]
            offset += segment.size
        return tuple(intervals)

    def refusal(self) -> str | None:
        if len({segment.ranks for segment in self.segments}) != 1:
            return f"the segments of {self.axis} are on different numbers of ranks"
        return next(filter(None, (segment.refusal() for segment in self.segments)), None)

    def overlap(self) -> str | None:
        return next(filter(None, (segment.overlap() for segment in self.segments)), None)

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True)
class TokenLayout:
    """The token axis in nearly equal runs; the number of tokens is known only at run time."""

    ranks: int
    symbol: str = "T"
    axis: str = "tokens"

    def run(self, rank: int, tokens: int) -> Interval:
        return rank * tokens // self.ranks, (rank + 1) * tokens // self.ranks

    def refusal(self) -> str | None:
        return None

    def overlap(self) -> str | None:
        return None

    def __str__(self) -> str:
        return self.axis


AnyLayout = Layout | FusedLayout | TokenLayout


def even_runs(units: int, ranks: int) -> tuple[tuple[Interval, ...], ...]:
    """Return one contiguous run per rank; sizes differ by at most one, longer runs come first."""
    short, longer = divmod(units, ranks)
    stops = [(rank + 1) * short + min(rank + 1, longer) for rank in range(ranks)]
    return tuple(((start, stop),) for start, stop in zip([0, *stops], stops, strict=False))
