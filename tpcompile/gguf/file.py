"""Reading the metadata and the table of tensors of GGUF files, also of several files.

Every count and size is checked against the size of the file before it is used, so a damaged file is
an error, and takes no more memory than a valid one.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpcompile.errors import CheckpointError
from tpcompile.gguf.conversions import Heads, Order, Transform
from tpcompile.gguf.kinds import GgufKind
from tpcompile.json_files import shortened

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""The first bytes of a GGUF file."""
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_SCALARS = "BbHhIif?"
"""The codes of `struct` for the kinds of values 0 to 7."""
_TEXT, _ARRAY = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}
_CODES = {**dict(enumerate(_SCALARS)), **_WIDE}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_COUNT, _NUMBER = "split.count", "split.no"


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor in a file, and how it is stored."""

    path: Path
    kind: GgufKind
    shape: tuple[int, ...]
    """The extents in the order of torch: rows first."""
    start: int
    """The byte of the file at which it begins."""
    order: Order | Heads | None = None
    """The order along an axis, if it is not that of transformers."""
    transform: Transform | None = None
    """The function from stored values to its values, if they differ."""
    parts: tuple[GgufTensor, ...] = ()
    """The tensors that have its rows, one after another, if there are several."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        columns, size = self.kind.block
        return self.shape[-1] // columns * size


@dataclass(frozen=True)
class GgufFile:
    """A model in one GGUF file, or in several."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    sizes: Mapping[Path, int]
    """The bytes of each file."""


def is_gguf(model: object) -> bool:
    """Return whether MODEL is the path of a GGUF file."""
    return isinstance(model, str | Path) and str(model).endswith(SUFFIX) and os.path.isfile(model)


def open_gguf(path: str | Path) -> GgufFile:
    """Read the metadata and the table of tensors of a model, which may be in several files."""
    first = Path(path)
    changed = tuple((file, file.stat().st_mtime_ns) for file in _files(first))
    return _opened(first, changed)


@lru_cache(maxsize=2)
def _opened(path: Path, changed: tuple[tuple[Path, int], ...]) -> GgufFile:
    """Read files once, as long as none of them changes; a vocabulary has 150,000 texts."""
    parts = [_read(file) for file, _ in changed]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        told = part.metadata.get(_COUNT, 1), part.metadata.get(_NUMBER, 0)
        if told != (len(parts), number):
            raise _invalid(
                part.path,
                f"split.count and split.no are {told[0]} and {told[1]}",
                f"{len(parts)} and {number}, as its name says",
                "Download all files of the model again, and keep their names",
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise _invalid(part.path, f"a second tensor {shortened(name)}", "one of each name")
            tensors[name] = tensor
    sizes = {part.path: part.sizes[part.path] for part in parts}
    return GgufFile(path, parts[0].metadata, tensors, sizes)


def _files(path: Path) -> list[Path]:
    """Return the files of a model, given one of them."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, count = match.groups()
    files = [
        path.with_name(f"{name}-{number:05d}-of-{count}{SUFFIX}")
        for number in range(1, min(int(count), 10**4) + 1)
    ]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"The model lacks the file {file.name}",
                where=str(path.parent),
                expected=f"{int(count)} files",
                hint="Download the missing files",
            )
    return files


def _read(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise _invalid(path, "an empty file", "a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data, size).file()
    except OSError as error:
        raise CheckpointError(
            "A file of the model cannot be read", where=str(path), got=str(error.strerror or error)
        ) from error


class _Parser:
    """A parser of one file, with its position."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._position = path, data, size, 0

    def file(self) -> GgufFile:
        """Parse the file up to its data, of which only the places are checked."""
        if self._bytes(4) != MAGIC:
            raise self._refusal("other first bytes", "GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._refusal(
                f"version {version}", "version 2 or 3, with the lowest byte of a number first"
            )
        tensors, pairs = self._count(4 + 4 + 8 + 4 + 8), self._count(8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                raise self._refusal(f"two values of {shortened(key)}", "one of each")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._refusal(f"{_ALIGNMENT}={alignment!r}", "a power of two of at least 8")
        entries = [self._entry() for _ in range(tensors)]
        data = -(-self._position // alignment) * alignment
        tensors_by_name: dict[str, GgufTensor] = {}
        end = 0
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[-1]):
            tensor = GgufTensor(self._path, kind, shape, data + offset)
            if offset % alignment or offset < end or data + offset + tensor.size > self._size:
                raise self._refusal(
                    f"the tensor {shortened(name)} at byte {data + offset:,}, "
                    f"{tensor.size:,} bytes long, in a file of {self._size:,} bytes",
                    "tensors one after the other, within the file",
                )
            if name in tensors_by_name:
                raise self._refusal(f"two tensors {shortened(name)}", "one of each name")
            tensors_by_name[name], end = tensor, offset + tensor.size
        return GgufFile(self._path, metadata, tensors_by_name, {self._path: self._size})

    def _entry(self) -> tuple[str, GgufKind, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._refusal(
                f"{dimensions} dimensions of {shortened(name)}", f"1 to {_MOST_DIMENSIONS}"
            )
        extents = [int(self._number("Q")) for _ in range(dimensions)]
        number, offset = int(self._number("I")), int(self._number("Q"))
        try:
            kind = GgufKind(number)
        except ValueError:
            raise CheckpointError(
                f"The tensor {shortened(name)} has a kind that tpcompile does not know",
                where=str(self._path),
                got=f"the number {number}",
                expected=", ".join(member.name for member in GgufKind),
                hint="Use a file in another quantization, such as Q8_0 or Q4_0",
            ) from None
        if extents[0] % kind.block.columns or min(extents) < 1 or math.prod(extents) >> 48:
            raise self._refusal(
                f"extents {extents} of {shortened(name)}",
                f"at least 1, and rows of whole blocks of {kind.block.columns} elements",
            )
        return name, kind, tuple(reversed(extents)), offset

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        element = int(self._number("I"))
        if element == _TEXT:
            return [self._text() for _ in range(self._count(8))]
        code = self._code(element)
        count = self._count(struct.calcsize(f"<{code}"))
        return list(
            struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(f"<{code}")))
        )

    def _code(self, kind: int) -> str:
        if kind not in _CODES:
            raise self._refusal(f"a value of kind {kind}", "a number, a text or an array of them")
        return _CODES[kind]

    def _text(self) -> str:
        raw = self._bytes(int(self._number("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._refusal(f"a text with {error.reason}", "UTF-8") from error

    def _count(self, least: int) -> int:
        """Read the number of items that follow, each of at least `least` bytes."""
        count = int(self._number("Q"))
        if count * least > self._size - self._position:
            raise self._refusal(f"a count of {count:,}", "as many as fit into the file")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > self._size:
            raise self._refusal(
                f"a part that ends at byte {self._position:,}", f"{self._size:,} bytes"
            )
        return self._data[start : self._position]

    def _refusal(self, got: str, expected: str) -> CheckpointError:
        return _invalid(self._path, got, expected)


def _invalid(
    path: Path, got: str, expected: str, hint: str = "It may be damaged: download it again"
) -> CheckpointError:
    return CheckpointError(
        "A GGUF file is not valid", where=str(path), got=got, expected=expected, hint=hint
    )
