"""Regions: the parts of buffers that instructions read and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import lt
from typing import NamedTuple

from tpcompile.vm.program.buffer import Box

NONE = -1
"""The buffer number of an absent operand, such as the bias of a linear without one."""


class Range(NamedTuple):
    """A half-open interval: `start` is included, `stop` is not."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Region(NamedTuple):
    """A part of a buffer, which is identified by its number."""

    buffer: int
    box: Box


class Join(NamedTuple):
    """A block of a head that several instructions compute. The last to arrive finishes the head.

    All blocks of a head name the same region. They are not ordered among themselves. To all other
    instructions that access the region, they are one write.
    """

    region: Region
    part: tuple[int, int]
    """The rows of the head that this block computes: start and stop."""
    whole: int
    """The number of rows of the head."""
    arrivals: int
    """The number of blocks."""
    finish: tuple[float, ...] = ()
    """The operands that finish the head. Any block may be last, so all must have the same."""


def overlap(box: Box, other: Box) -> bool:
    """Return whether two parts of one buffer share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True))


def remainder(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that make up the elements of `box` that are in none of the others."""
    left = [box]
    for other in others:
        left = [piece for part in left for piece in _outside(part, other)]
    return left


def _outside(box: Box, other: Box) -> list[Box]:
    if not overlap(box, other):
        return [box]
    pieces: list[Box] = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, other, strict=True)):
        before, after = box[:dim], box[dim + 1 :]
        if start < first:
            pieces.append((*before, (start, first), *after))
        if last < stop:
            pieces.append((*before, (last, stop), *after))
        box = (*before, (max(start, first), min(stop, last)), *after)
    return pieces


def all_fit(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether all boxes are non-empty parts of a buffer of this shape."""
    if set(map(len, boxes)) - {len(shape)}:
        return False
    for extent, intervals in zip(shape, zip(*boxes, strict=True), strict=False):
        starts, stops = zip(*intervals, strict=True)
        if min(starts) < 0 or max(stops) > extent or not all(map(lt, starts, stops)):
            return False
    return True


def refusal(box: Box, shape: tuple[int, ...]) -> str:
    """Explain why the box does not fit in a buffer of this shape; return "" if it does."""
    if len(box) != len(shape):
        return f"a box of {len(box)} intervals in a buffer of {len(shape)} dimensions"
    for dim, ((start, stop), extent) in enumerate(zip(box, shape, strict=True)):
        if not 0 <= start < stop <= extent:
            return f"{start}:{stop} in dimension {dim}, whose extent is {extent}"
    return ""


def box_text(box: Box) -> str:
    return "[" + ", ".join([f"{start}:{stop}" for start, stop in box]) + "]"
