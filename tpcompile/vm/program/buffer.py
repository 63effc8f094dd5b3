"""Buffers: the tensors of a program, their roles and their element types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from tpcompile.errors import UnsupportedError

Box = tuple[tuple[int, int], ...]
"""An interval in each dimension of a buffer."""


class Role(IntEnum):
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

    @property
    def word(self) -> str:
        """The name in text: `lengths` for LENGTHS."""
        return self.name.lower()

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
        return self not in (Role.SCRATCH, Role.WEIGHT)


_KINDS = {
    Role.SCRATCH: "scratch",
    Role.LOGITS: "scratch",
    Role.WEIGHT: "weight",
    Role.CACHE: "cache",
    **dict.fromkeys((Role.TABLES, Role.STOPS, Role.COS, Role.SIN), "input"),
}


class DType(IntEnum):
    """The element types of buffers. The numbers are part of the binary interface."""

    F32 = 1
    BF16 = 2
    F16 = 3
    I32 = 4
    I64 = 5
    I1 = 6

    @staticmethod
    def of(dtype: torch.dtype) -> DType:
        """Return the element type of a torch dtype."""
        for found, known in _TORCH.items():
            if known == dtype:
                return found
        raise UnsupportedError(
            "Programs do not support buffers of this dtype",
            got=str(dtype),
            expected=", ".join(map(str, _TORCH.values())),
        )

    @property
    def word(self) -> str:
        """The name in text: `bf16` for BF16."""
        return self.name.lower()

    @property
    def torch(self) -> torch.dtype:
        return _TORCH[self]

    @property
    def itemsize(self) -> int:
        """The bytes per element."""
        return self.torch.itemsize

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of consecutive columns of a weight's row, wherever they begin."""
        return columns * self.itemsize


_TORCH = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.I1: torch.bool,
}


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
    """The shape of the cache in memory, whose dimensions are not those of regions."""

    @property
    def box(self) -> Box:
        """The whole buffer."""
        return tuple((0, extent) for extent in self.shape)

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the tensor in memory."""
        return self.shape if self.storage is None else self.storage

    def strides(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the strides, in elements, of a tensor with these extents.

        Tensors are contiguous. In the cache, the slots of a head are contiguous, because attention
        reads them in this order: `[layers, 2, slots, heads, width]` has the strides of a
        contiguous `[layers, 2, heads, slots, width]`.
        """
        order = CACHE_ORDER if self.role == Role.CACHE else range(len(extents))
        found = [1] * len(extents)
        step = 1
        for dim in reversed(order):
            found[dim] = step
            step *= extents[dim]
        return tuple(found)

    def has_strides(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has these strides, ignoring dimensions of extent 1.

        An empty tensor has no elements that strides could misplace.
        """
        if not tensor.numel():
            return True
        wanted = self.strides(tensor.shape)
        each = zip(tensor.shape, tensor.stride(), wanted, strict=True)
        return all(extent == 1 or got == stride for extent, got, stride in each)


class WrongBuffer(NamedTuple):
    """A problem with a buffer itself, whatever instructions do with it."""

    number: int
    what: str
    """The buffer and its wrong field."""
    got: str
    expected: str


def wrong_buffers(buffers: Iterable[Buffer], ranks: int) -> Iterator[WrongBuffer]:
    """Yield the first problem of each buffer that cannot be allocated as it is described.

    Executors allocate every buffer, also one that no instruction uses. Only the cache may have a
    storage: the regions of any other buffer are parts of its memory.
    """
    for number, buffer in enumerate(buffers):
        wrong = _wrong_field(buffer, ranks)
        if wrong is not None:
            field, expected = wrong
            what = f"{field} of buffer {number} ({buffer.role.word} buffer {buffer.name})"
            yield WrongBuffer(number, what, str(getattr(buffer, field)), expected)


def _wrong_field(buffer: Buffer, ranks: int) -> tuple[str, str] | None:
    """Return a field that is wrong and the value expected, or None."""
    if not 0 <= buffer.rank < ranks:
        return "rank", f"a rank from 0 to {ranks - 1}"
    if buffer.dtype not in _TORCH.values():
        return "dtype", ", ".join(map(str, _TORCH.values()))
    if any(extent < 1 for extent in buffer.shape):
        return "shape", "extents of at least 1"
    if buffer.role != Role.CACHE:
        return None if buffer.storage is None else ("storage", "None: only the cache has one")
    if len(buffer.storage or ()) != len(CACHE_ORDER) or min(buffer.extents) < 1:
        return "storage", f"{len(CACHE_ORDER)} extents of at least 1"
    return None
