"""Codecs: how a checkpoint stores components of weights that are stored otherwise in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tpcompile.ir.dtypes import DType
from tpcompile.ir.words import WORD_BITS, packed, unpacked

Box = tuple[slice, ...]


class Codec(ABC):
    """How a checkpoint stores a component: as one tensor of another name, shape and dtype.

    To add a layout, derive a class, and name it in the table of layouts of the frontend.
    """

    name: str
    """The last part of the tensor's name, such as `weight_packed`."""
    dtype: ClassVar[DType]
    """The dtype of the tensor."""

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given that of the component."""

    @abstractmethod
    def box(self, box: Box) -> Box:
        """Return the part of the tensor that must be read for a part of the component."""

    @abstractmethod
    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        """Return a part of the component from the part of the tensor that was read for it."""

    @abstractmethod
    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, given the whole component."""


@dataclass(frozen=True)
class Words(Codec):
    """Integers as int32 words of several neighbours along a dimension: see `words.py`."""

    name: str
    bits: int
    dim: int
    dtype: ClassVar[DType] = DType.I32

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            self._words(extent) if dim == self.dim else extent for dim, extent in enumerate(shape)
        )

    def box(self, box: Box) -> Box:
        return tuple(
            slice(one.start // self._each, self._words(one.stop)) if dim == self.dim else one
            for dim, one in enumerate(box)
        )

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        wanted = box[self.dim]
        found = unpacked(read.movedim(self.dim, -1), self.bits).movedim(-1, self.dim)
        return found.narrow(self.dim, wanted.start % self._each, wanted.stop - wanted.start)

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return packed(whole.movedim(self.dim, -1), self.bits).movedim(-1, self.dim)

    @property
    def _each(self) -> int:
        """The number of integers per word."""
        return WORD_BITS // self.bits

    def _words(self, extent: int) -> int:
        return -(-extent // self._each)


@dataclass(frozen=True)
class Encoded:
    """The name of a tensor in the checkpoint, and its codec."""

    name: str
    codec: Codec


@dataclass(frozen=True)
class Encodings:
    """What a checkpoint stores otherwise than memory."""

    components: Mapping[str, Encoded] = field(default_factory=dict)
    """The components that it stores by a codec, by name."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The tensors that repeat the shape of a weight, by name."""


NO_ENCODINGS = Encodings()
