"""The values in the buffers of a program while its instructions run in order.

A value takes a part of a buffer, its *frame*. Instructions store it tile by tile, and it may be
read once its tiles cover the frame. Another value in the frame, or in one that overlaps it, makes
the old one unreadable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from tpcompile.vm.program import Box, overlap
from tpcompile.vm.program.region import remainder
from tpcompile.vm.proof.terms import Term

Tiles = tuple[Box, ...]


@dataclass
class Stored:
    """A value in a frame, and the tiles of it that are stored."""

    value: Term
    whole: Box
    """The frame. If instructions store blocks of rows of heads, these rows are a last dimension."""
    tiles: list[Box] = field(default_factory=list)

    @property
    def missing(self) -> list[Box]:
        """The parts of the frame that no tile covers."""
        tiles = tuple(self.tiles)
        return [] if covers(tiles, self.whole) else remainder(self.whole, tiles)


class Contents:
    """The values by buffer and frame."""

    def __init__(self) -> None:
        self._frames: dict[int, dict[Box, Stored]] = {}

    def at(self, buffer: int, frame: Box) -> Stored | None:
        """Return the value in a frame of a buffer; None if nothing has been stored in it."""
        return self._frames.get(buffer, {}).get(frame)

    def touched(self, buffer: int, frame: Box) -> bool:
        """Return whether a value in another frame may have overwritten a part of this one."""
        return any(overlap(frame, other) for other in self._frames.get(buffer, {}))

    def spoil(self, buffer: int, box: Box) -> None:
        """Forget the values in a part of a buffer that another write overwrites."""
        for frame, held in self._frames.get(buffer, {}).items():
            if overlap(frame, box):
                held.tiles.clear()

    def store(self, buffer: int, frame: Box, new: Stored) -> None:
        """Store tiles of a value."""
        frames = self._frames.setdefault(buffer, {})
        held = frames.get(frame)
        if held is None:
            self.spoil(buffer, frame)
        if held is not None and held.value is new.value and held.whole == new.whole:
            held.tiles += new.tiles
        else:
            frames[frame] = new


@lru_cache(maxsize=4096)
def covers(tiles: Tiles, box: Box) -> bool:
    """Return whether tiles cover a box."""
    if not box:
        return bool(tiles)
    (start, stop), inner_box = box[0], box[1:]
    inner: dict[tuple[int, int], set[Box]] = {}
    for tile in tiles:
        inner.setdefault(tile[0], set()).add(tile[1:])
    edges = sorted({edge for interval in inner for edge in interval if start < edge < stop})
    for first, last in zip((start, *edges), (*edges, stop), strict=True):
        inner_tiles = {
            tile for (a, b), boxes in inner.items() if a <= first and last <= b for tile in boxes
        }
        if not covers(tuple(sorted(inner_tiles)), inner_box):
            return False
    return True


def disjoint(tiles: Sequence[Box]) -> bool:
    """Return whether the volumes of tiles add up to that of their bounding box.

    Tiles that cover the box then do not overlap.
    """
    dims = zip(*tiles, strict=True)
    whole = tuple(
        (min(a for a, _ in intervals), max(b for _, b in intervals)) for intervals in dims
    )
    return sum(map(_volume, tiles)) == _volume(whole)


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)
