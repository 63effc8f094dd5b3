"""Buffers, and the parts of them that instructions read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

Box = tuple[tuple[int, int], ...]
"""An interval in each dimension of a buffer."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that a program works on; `rank` is the one whose memory it lies in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    rank: int = 0
    kind: str = "scratch"
    """`weight` and `input` come from outside, `state` goes from step to step, and so does a
    `cache`; `scratch` holds nothing before the step."""
    storage: tuple[int, ...] | None = None
    """How it lies in memory, where regions count in other dimensions than tensors do."""

    @property
    def box(self) -> Box:
        """All of it."""
        return tuple((0, extent) for extent in self.shape)


class Region(NamedTuple):
    """A part of the buffer with this number."""

    buffer: int
    box: Box


class Join(NamedTuple):
    """One of several blocks of a head: the last of them to arrive, whichever it is, finishes it.

    All blocks name the same region. They compute it together, so they are in no order among
    themselves; for everything else that touches the region they are one write.
    """

    region: Region
    part: tuple[int, int]
    """The rows of the head that this block computes, from and to."""
    whole: int
    """How many rows the head has."""
    arrivals: int
    """How many blocks there are."""
    finish: tuple[float, ...] = ()
    """The operands that the head is finished by; any block may be last, so all have the same."""


def overlap(one: Box, other: Box) -> bool:
    """Whether two parts of one buffer share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def fits(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a buffer of this shape has such a part."""
    if len(box) != len(shape):
        return False
    for dim, extent in enumerate(shape):
        start, stop = box[dim]
        if not 0 <= start < stop <= extent:
            return False
    return True


def refusal(box: Box, shape: tuple[int, ...]) -> str:
    """Why a buffer of this shape has no such part; empty if it has."""
    if len(box) != len(shape):
        return f"{len(box)} intervals in a buffer of {len(shape)} dimensions"
    for dim, ((start, stop), extent) in enumerate(zip(box, shape, strict=True)):
        if not 0 <= start < stop <= extent:
            return f"{start} to {stop} in dimension {dim}, which goes from 0 to {extent}"
    return ""


def box_text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
