"""Buffers: the tensors of a program, their roles and their element types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tpcompile.ir.dtypes import DTYPES, Named, dtype_name
from tpcompile.ir.format import Component, Format
from tpcompile.ir.kv import KV_FORMATS, row_in_memory
from tpcompile.ir.layout import Interval

Box = tuple[tuple[int, int], ...]
"""An interval in each dimension of a buffer."""


class Role(Named):
    """The purpose of a buffer, by which executors find it. Only parameters are found by name.

    The numbers are part of the binary interface.
    """

    SCRATCH = 0
    WEIGHT = 1
    CACHE = 2
    LOGITS = 3
    TOKENS = 4
    POSITIONS = 5
    LENGTHS = 6
    FINISHED = 7
    CLOCK = 8
    HISTORY = 9
    ARRIVALS = 10
    TABLES = 11
    STOPS = 12
    COS = 13
    SIN = 14
    TAILS = 15
    STATES = 16
    READ = 17
    WRITE = 18

    @property
    def kind(self) -> str:
        """The origin and lifetime of the contents.

        `weight` and `input` come from outside, `state` and `cache` persist between steps, and
        `scratch` is undefined before a step.
        """
        return _KINDS.get(self, "state")

    @property
    def sole(self) -> bool:
        """Whether a rank has at most one buffer of this role."""
        return self not in (Role.SCRATCH, Role.WEIGHT, Role.ARRIVALS)


LINEAR_STATES = (Role.TAILS, Role.STATES)
"""The roles of the states of linear attention, whose numbers are in `READ` and `WRITE`."""
_KINDS = {
    Role.SCRATCH: "scratch",
    Role.LOGITS: "scratch",
    Role.WEIGHT: "weight",
    Role.CACHE: "cache",
    **dict.fromkeys(LINEAR_STATES, "cache"),
    **dict.fromkeys((Role.TABLES, Role.STOPS, Role.COS, Role.SIN), "input"),
    **dict.fromkeys((Role.READ, Role.WRITE), "input"),
}


_MATRIX, _MOST_COLUMNS = 2, 2**31 - 1
STORED_DIMS = {Role.CACHE: 5, Role.TAILS: 4, Role.STATES: 5}
"""The number of dimensions in memory of buffers whose regions have other dimensions, by role.

Regions index sequences."""
CACHE_ORDER = (0, 1, 3, 2, 4)
"""The dimensions of the cache's storage, the one with the largest stride first."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that a program uses; it is in the memory of `rank`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    rank: int = 0
    role: Role = Role.SCRATCH
    storage: tuple[int, ...] | None = None
    """The shape of the cache or of states in memory: see `STORED_DIMS`."""
    format: Format | None = None
    """The format of a weight, or of the rows of the cache, of several components; the values have
    this dtype."""
    first: int = 0
    """The first column of a weight in a format, among the columns of all ranks."""

    @property
    def stored(self) -> Format:
        """The format of a weight or the cache, also if its values are its only component."""
        return Format.of(self.dtype) if self.format is None else self.format

    @property
    def box(self) -> Box:
        """The whole buffer."""
        return tuple((0, extent) for extent in self.shape)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the tensor in memory; of a weight in a format, the shape of the values."""
        if self.storage is not None:
            row, _ = row_in_memory(self.storage[-1], self.dtype, self.format)
            return (*self.storage[:-1], row)
        return self.shape if self.format is None else self.extents_of(self.format.values)

    @property
    def columns(self) -> Interval:
        """The columns of a weight, among those of all ranks."""
        return self.first, self.first + self.shape[1]

    def extents_of(self, part: Component) -> tuple[int, int]:
        """Return the shape of a component of a weight in memory."""
        return self.shape[0], part.width(*self.columns)

    def strides(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the strides, in elements, of a tensor with these extents.

        Tensors are contiguous. In the cache, the slots of a head are contiguous, because attention
        reads them in this order: `[layers, 2, slots, heads, width]` has the strides of a
        contiguous `[layers, 2, heads, slots, width]`.
        """
        order = CACHE_ORDER if self.role == Role.CACHE else range(len(extents))
        strides = [1] * len(extents)
        step = 1
        for dim in reversed(order):
            strides[dim] = step
            step *= extents[dim]
        return tuple(strides)

    def has_strides(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has these strides, ignoring dimensions of extent 1.

        An empty tensor has no elements that strides could misplace.
        """
        if not tensor.numel():
            return True
        wanted = self.strides(tensor.shape)
        dims = zip(tensor.shape, tensor.stride(), wanted, strict=True)
        return all(extent == 1 or got == stride for extent, got, stride in dims)


class WrongBuffer(NamedTuple):
    """A problem with a buffer itself, regardless of instructions."""

    number: int
    subject: str
    """The buffer and its wrong field."""
    got: str
    expected: str


def wrong_buffers(buffers: Iterable[Buffer], ranks: int) -> Iterator[WrongBuffer]:
    """Yield the first problem of each buffer that cannot be allocated as it is described.

    Executors allocate every buffer, also one that no instruction uses. Only the cache and states
    have a storage: the regions of any other buffer are parts of its memory.
    """
    for number, buffer in enumerate(buffers):
        wrong = _wrong_field(buffer, ranks)
        if wrong is not None:
            field, expected = wrong
            description = f"{field} of buffer {number} ({buffer.role.word} buffer {buffer.name})"
            yield WrongBuffer(number, description, str(getattr(buffer, field)), expected)


def _has_format(buffer: Buffer, stored: Format) -> bool:
    """Return whether a buffer of this role and shape may have a format."""
    if buffer.role == Role.CACHE:
        return stored in KV_FORMATS.values()
    return buffer.role == Role.WEIGHT and len(buffer.shape) == _MATRIX


def _wrong_field(buffer: Buffer, ranks: int) -> tuple[str, str] | None:
    """Return a field that is wrong and the value expected, or None."""
    if not 0 <= buffer.rank < ranks:
        return "rank", f"a rank from 0 to {ranks - 1}"
    if buffer.dtype not in DTYPES.values():
        return "dtype", ", ".join(map(str, DTYPES.values()))
    if any(extent < 1 for extent in buffer.shape):
        return "shape", "extents of at least 1"
    if buffer.format is not None and (
        buffer.dtype != buffer.format.values.dtype.torch or not _has_format(buffer, buffer.format)
    ):
        held = f"of a matrix of weights or of a cache in {dtype_name(buffer.dtype)}"
        return "format", f"None, or that {held}"
    if not 0 <= buffer.first <= (0 if buffer.format is None else _MOST_COLUMNS):
        return "first", "the first column of a weight in a format, or 0"
    if buffer.format is not None and buffer.first % buffer.format.grain:
        return "first", f"a multiple of {buffer.format.grain} columns"
    dims = STORED_DIMS.get(buffer.role)
    if dims is None:
        expected = "None: only the cache and states have one"
        return None if buffer.storage is None else ("storage", expected)
    if len(buffer.storage or ()) != dims or min(buffer.extents) < 1:
        return "storage", f"{dims} extents of at least 1"
    return None
