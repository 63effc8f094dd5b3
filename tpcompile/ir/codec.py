"""Codecs: how a checkpoint stores components of weights that have another layout in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.ir.words import WORD_BITS, packed, unpacked

Box = tuple[slice, ...]


class Codec(ABC):
    """The storage of a component in a checkpoint: one tensor of another name, shape and dtype.

    To add a layout, derive a class, and name it in the table of layouts of the frontend.
    """

    name: str
    """The last part of the tensor's name, such as `weight_packed`."""

    def dtype(self, component: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor, given that of the component: by default the same."""
        return component

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
class Transposed(Codec):
    """The component with rows and columns exchanged."""

    name: str

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def box(self, box: Box) -> Box:
        return box[::-1]

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        return read.T

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.T.contiguous()


@dataclass(frozen=True)
class Words(Codec):
    """Integers as int32 words of several neighbours along a dimension: see `words.py`."""

    name: str
    bits: int
    dim: int
    """The dimension of the component whose neighbours share a word."""
    transposed: bool = False
    """Whether rows and columns are exchanged."""
    order: tuple[int, ...] = ()
    """The places of the neighbours in a word, the one in its lowest bits first."""
    less: int = 0
    """The number that is subtracted from integers before they are stored."""

    def dtype(self, component: torch.dtype) -> torch.dtype:
        return torch.int32

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        extents = tuple(
            self._words(extent) if dim == self.dim else extent for dim, extent in enumerate(shape)
        )
        return extents[::-1] if self.transposed else extents

    def box(self, box: Box) -> Box:
        spans = tuple(
            slice(span.start // self.per_word, self._words(span.stop)) if dim == self.dim else span
            for dim, span in enumerate(box)
        )
        return spans[::-1] if self.transposed else spans

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        wanted = box[self.dim]
        rows = read.T if self.transposed else read
        integers = unpacked(rows.movedim(self.dim, -1), self.bits)
        if self.order:
            places = torch.tensor(self.order).argsort()
            integers = self._words_of(integers)[..., places].flatten(-2)
        integers = integers.movedim(-1, self.dim)
        integers = integers.narrow(
            self.dim, wanted.start % self.per_word, wanted.stop - wanted.start
        )
        return self._raised(integers) if self.less else integers

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        rows = (whole - self.less).movedim(self.dim, -1)
        if self.order:
            rows = self._words_of(rows)[..., self.order].flatten(-2)
        words = packed(rows, self.bits).movedim(-1, self.dim)
        return (words.T if self.transposed else words).contiguous()

    def _words_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*rows.shape[:-1], -1, self.per_word)

    def _raised(self, integers: torch.Tensor) -> torch.Tensor:
        most = torch.iinfo(integers.dtype).max - self.less
        if integers.numel() and int(integers.max()) > most:
            raise CheckpointError(
                f"A tensor {self.name} holds an integer that does not fit into int8",
                got=str(int(integers.max()) + self.less),
                expected=f"at most {most + self.less}",
                hint="The checkpoint may be damaged: download it again",
            )
        return integers + self.less

    @property
    def per_word(self) -> int:
        """The number of integers per word."""
        return WORD_BITS // self.bits

    def _words(self, extent: int) -> int:
        return -(-extent // self.per_word)


@dataclass(frozen=True)
class WordsOfRows(Codec):
    """Words of neighbours of a row, stored as words of other neighbours."""

    name: str
    stored: Words

    def dtype(self, component: torch.dtype) -> torch.dtype:
        return self.stored.dtype(component)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, words = shape
        return self.stored.shape((rows, words * self.stored.per_word))

    def box(self, box: Box) -> Box:
        return self.stored.box(self._integers(box))

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        return packed(self.stored.decoded(read, self._integers(box)), self.stored.bits)

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return self.stored.encoded(unpacked(whole, self.stored.bits))

    def _integers(self, box: Box) -> Box:
        rows, words = box
        return rows, slice(words.start * self.stored.per_word, words.stop * self.stored.per_word)


@dataclass(frozen=True)
class OfRows(Codec):
    """A component with one row for several adjacent rows of the weight."""

    name: str
    rows: int
    """The rows of the weight per row of the tensor. The last one may have fewer."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return -(-shape[0] // self.rows), *shape[1:]

    def box(self, box: Box) -> Box:
        rows, *trailing = box
        return slice(rows.start // self.rows, -(-rows.stop // self.rows)), *trailing

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        repeated = read.repeat_interleave(self.rows, 0)
        return repeated.narrow(0, box[0].start % self.rows, box[0].stop - box[0].start)

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[:: self.rows].contiguous()


@dataclass(frozen=True)
class OfWeight(Codec):
    """A component whose elements are all the same number."""

    name: str
    dims: int
    """The dimensions of the tensor, which has one element."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) * self.dims

    def box(self, box: Box) -> Box:
        return (slice(0, 1),) * self.dims

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        return read.reshape(()).expand([span.stop - span.start for span in box])

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.flatten()[:1].reshape(self.shape(())).contiguous()


@dataclass(frozen=True)
class Finite(Codec):
    """The component itself, which must not have NaN."""

    name: str

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def box(self, box: Box) -> Box:
        return box

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        if bool(read.isnan().any()):
            raise CheckpointError(
                f"A tensor {self.name} holds NaN",
                expected="numbers",
                hint="The checkpoint may be damaged: download it again",
            )
        return read

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        return whole


@dataclass(frozen=True)
class Blocks(Codec):
    """A row as blocks of bytes, each of which holds some elements of the component."""

    name: str
    size: int
    """The bytes of a block."""
    per_block: int
    """The elements of the component per block."""
    elements_of: Callable[[torch.Tensor], torch.Tensor]
    """A function from blocks, `[rows, blocks, size]`, to elements, `[rows, blocks, per_block]`."""

    def dtype(self, component: torch.dtype) -> torch.dtype:
        return torch.uint8

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = shape
        return rows, -(-columns // self.per_block) * self.size

    def box(self, box: Box) -> Box:
        rows, columns = box
        first, last = columns.start // self.per_block, -(-columns.stop // self.per_block)
        return rows, slice(first * self.size, last * self.size)

    def decoded(self, read: torch.Tensor, box: Box) -> torch.Tensor:
        columns = box[1]
        elements = self.elements_of(read.reshape(len(read), -1, self.size)).flatten(1)
        return elements.narrow(1, columns.start % self.per_block, columns.stop - columns.start)

    def encoded(self, whole: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError(
            "tpcompile does not write tensors in blocks, as GGUF files have them",
            hint="Copy the GGUF file itself, or save the checkpoint that it was made from",
        )


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor whose values follow from the configuration. Other values are refused."""

    value: torch.Tensor
    dtypes: tuple[str, ...]
    """The dtypes in which it may be stored."""
    required: bool = True
    """Whether it must be there, and is written to checkpoints."""
    hint: str = "The config.json and the files must be of the same checkpoint"


@dataclass(frozen=True)
class Encodings:
    """The components that a checkpoint stores differently than memory."""

    components: Mapping[str, Codec] = field(default_factory=dict)
    """The codecs of these components, by name."""
    known: Mapping[str, Known] = field(default_factory=dict)
    """The tensors that repeat values of the configuration, by name."""


NO_ENCODINGS = Encodings()
