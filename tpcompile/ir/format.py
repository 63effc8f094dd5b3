"""Formats: how a weight is stored, as one tensor or as several that make its values together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch

from tpcompile.ir.dtypes import DTYPES, DType
from tpcompile.ir.layout import Interval
from tpcompile.ir.words import WORD_BITS, unpacked

_ROW, _OFFSETS, _ROUNDS = "row", "offsets", "a8"
_WORD = re.compile(
    rf"(int8|int4):({_ROW}|[1-9][0-9]{{0,4}}):(f32|bf16|f16)(:{_OFFSETS})?(:{_ROUNDS})?"
)
_GRAIN = 16
_MOST_BLOCK = 128
_ROUNDS_BIT = 1 << 14
MOST_COLUMNS = (1 << 15) - 1
"""The maximum number of columns per group."""


class Kind(IntEnum):
    """How the values of a weight are stored. The numbers are part of the binary interface."""

    F32 = DType.F32
    BF16 = DType.BF16
    F16 = DType.F16
    INT8 = DType.I8
    INT4 = 8
    """Words of eight columns: see `words.py`."""

    @property
    def word(self) -> str:
        """The name in text: `int4` for INT4."""
        return self.name.lower()

    @property
    def suffix(self) -> str:
        """The suffix of the component that has the values."""
        return _VALUES[self].suffix if self in _VALUES else ""


class Component(NamedTuple):
    """A tensor of a weight. Each of its rows belongs to a row of the weight."""

    suffix: str
    """The end of its name, which follows the name of the weight."""
    dtype: DType
    columns: int = 1
    """The columns of the weight per element; 0 if a whole row has one."""

    def span(self, start: int, stop: int) -> Interval:
        """Return the elements of a row that belong to these columns of the weight.

        The first and the last element may belong to other columns too.
        """
        return (start // self.columns, -(-stop // self.columns)) if self.columns else (0, 1)

    def row_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of these elements of a row."""
        return self.width(start, stop) * self.dtype.itemsize

    def width(self, start: int, stop: int) -> int:
        """Return the number of these elements of a row."""
        first, last = self.span(start, stop)
        return last - first


class Format(int):
    """How a weight is stored, as a number that instructions have as an operand.

    A floating-point format has one component, the values. Its number is that of the element type.
    `int8:64:bf16` has the components values, in int8, and scales, in bf16; groups of 64 columns of
    a row share a scale, and `row` stands for all columns. `int4:64:bf16:offsets` has offsets too,
    one per scale: a weight is (value - offset) * scale. Groups lie on the columns of the whole
    weight, also where ranks hold some of its columns. `int8:64:bf16:a8` is stored like
    `int8:64:bf16`, but linears round their inputs to int8 before they multiply them: see
    `rounded` in `quantize.py`.

    Bits 0 to 7 of the number are a `Kind`, bits 8 to 13 the dtype of the scales, bit 14 says
    whether inputs are rounded, bit 15 whether there are offsets, and bits 16 to 30 are the columns
    per group, 0 for rows.
    """

    def __new__(cls, number: int) -> Format:
        """Return the format with this number. Raise ValueError for any other number."""
        found = super().__new__(cls, number)
        kind, scales = number & 255, number >> 8 & 63
        plain = number in _FLOATS
        if not plain and not (
            kind in _GROUPED and scales in _FLOATS and 0 <= number >> 16 <= MOST_COLUMNS
        ):
            raise ValueError(f"{number} is not a valid format")
        return found

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """Return the format of values in this dtype."""
        return _plain(DType.of(dtype))

    @staticmethod
    def grouped(
        kind: Kind, scales: torch.dtype, columns: int = 0, *, offsets: bool = False
    ) -> Format:
        """Return the format of integers with a scale per so many columns, or per row."""
        if not 0 <= columns <= MOST_COLUMNS:
            raise ValueError(f"groups of {columns} columns are too wide")
        return Format(kind | DType.of(scales) << 8 | offsets << 15 | columns << 16)

    @staticmethod
    def int8(scales: torch.dtype, columns: int = 0, *, offsets: bool = False) -> Format:
        """Return the format of int8 values with such scales."""
        return Format.grouped(Kind.INT8, scales, columns, offsets=offsets)

    @staticmethod
    def int4(scales: torch.dtype, columns: int = 0, *, offsets: bool = False) -> Format:
        """Return the format of 4-bit values with such scales."""
        return Format.grouped(Kind.INT4, scales, columns, offsets=offsets)

    @staticmethod
    def parsed(word: str) -> Format:
        """Return the format of this name. Raise ValueError with the expected form."""
        if word in _WORDS:
            return _WORDS[word]
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{', '.join(_WORDS)} or a format such as int8:64:bf16")
        kind, columns, scales, offsets, rounds = found.groups()
        stored = Format.grouped(
            _GROUPED_WORDS[kind],
            DTYPES[scales],
            0 if columns == _ROW else int(columns),
            offsets=offsets is not None,
        )
        return stored if rounds is None else stored.rounding()

    def __str__(self) -> str:
        _, *scales = self.components
        if not scales:
            return self.kind.word
        words = [self.kind.word, str(scales[0].columns or _ROW), scales[0].dtype.word]
        return ":".join([*words, *[_OFFSETS] * self.offsets, *[_ROUNDS] * self.rounds])

    __repr__ = __str__

    @property
    def components(self) -> tuple[Component, ...]:
        """The tensors, values first."""
        return _components(self)

    @property
    def kind(self) -> Kind:
        """How the values are stored."""
        return Kind(self & 255)

    @property
    def offsets(self) -> bool:
        """Whether there are offsets, which are subtracted from values."""
        return bool(self >> 15 & 1)

    @property
    def rounds(self) -> bool:
        """Whether linears round their inputs to int8 before they multiply them."""
        return bool(self & _ROUNDS_BIT)

    @property
    def columns(self) -> int:
        """The columns per group; 0 if a whole row is one."""
        return self >> 16

    @property
    def block(self) -> int:
        """The columns of an input that are rounded with one scale: a group, or a part of it."""
        return min(self.columns or _MOST_BLOCK, _MOST_BLOCK)

    def rounding(self, rounds: bool = True) -> Format:
        """Return this format of few bits, for linears that round their inputs, or do not."""
        return Format(self | _ROUNDS_BIT if rounds else self & ~_ROUNDS_BIT)

    @property
    def values(self) -> Component:
        """The component of the values."""
        return self.components[0]

    @property
    def plain(self) -> bool:
        """Whether the only component is the values themselves."""
        return len(self.components) == 1

    @property
    def grain(self) -> int:
        """Ranks may cut rows at multiples of so many columns, also within a group."""
        return 1 if self.plain else _GRAIN

    def row_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of these columns of a row, with those that they share with others."""
        return sum(one.row_bytes(start, stop) for one in self.components)

    def decoded(
        self, parts: Mapping[str, torch.Tensor], columns: Interval, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of rows from their components, given by suffix.

        The rows consist of these columns of the whole weight. Differences are exact, and products
        are computed in fp32 before they are rounded to `dtype`.
        """
        values, *others = self.components
        found = parts[values.suffix]
        if not others:
            return found.to(dtype)
        start, stop = columns
        if self.kind == Kind.INT4:
            skipped = start % values.columns
            found = unpacked(found, 4)[..., skipped : skipped + stop - start]
        each = others[0].columns or stop
        places = torch.arange(start, stop, device=found.device) // each - start // each
        scales, *offsets = (parts[one.suffix].float()[..., places] for one in others)
        found = found.float()
        return ((found - offsets[0] if offsets else found) * scales).to(dtype)


_FLOATS = (DType.F32, DType.BF16, DType.F16)
_GROUPED = (Kind.INT8, Kind.INT4)
_GROUPED_WORDS = {kind.word: kind for kind in _GROUPED}
_VALUES = {Kind.INT4: Component("_packed", DType.I32, WORD_BITS // 4)}
"""The values of formats in which they are not one element per column."""


@cache
def _components(one: Format) -> tuple[Component, ...]:
    kind, scales, columns = one.kind, one >> 8 & 63, one.columns
    found = [_VALUES.get(kind) or Component("", DType(kind))]
    if scales:
        found.append(Component("_scale", DType(scales), columns))
    if one.offsets:
        found.append(Component("_zero_point", DType.I8, columns))
    return tuple(found)


@cache
def _plain(dtype: DType) -> Format:
    return Format(dtype)


FLOATS = tuple(map(_plain, _FLOATS))
"""The formats of weights that are stored as their values."""
_WORDS = {str(one): one for one in FLOATS}
