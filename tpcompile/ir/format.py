"""Formats: how a weight is stored, as one tensor or as several that make its values together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from tpcompile.ir.dtypes import DTYPES, DType
from tpcompile.ir.layout import Interval

_ROW = "row"
_WORD = re.compile(r"int8:(row|[1-9][0-9]{0,4}):(f32|bf16|f16)")
_GRAIN = 16
_MOST_COLUMNS = (1 << 15) - 1


class Component(NamedTuple):
    """A tensor of a weight. Each of its rows belongs to a row of the weight."""

    suffix: str
    """The end of its name, which follows the name of the weight."""
    dtype: DType
    columns: int = 1
    """The columns of the weight that share an element; 0 if a whole row does."""

    def span(self, start: int, stop: int) -> Interval:
        """Return the elements of a row that belong to these columns of the weight.

        The first and the last element may belong to other columns too.
        """
        return (start // self.columns, -(-stop // self.columns)) if self.columns else (0, 1)

    def row_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of these elements of a row."""
        first, last = self.span(start, stop)
        return (last - first) * self.dtype.itemsize


class Format(int):
    """How a weight is stored, as a number that instructions have as an operand.

    A floating-point format has one component, the values. Its number is that of the element type.
    `int8:64:bf16` has the components values, in int8, and scales, in bf16; groups of 64 columns of
    a row share a scale, and `row` stands for all columns. Groups lie on the columns of the whole
    weight, also where ranks hold some of its columns.
    """

    def __new__(cls, number: int) -> Format:
        """Return the format with this number. Raise ValueError for any other number."""
        found = super().__new__(cls, number)
        values, scales, group = number & 255, number >> 8 & 255, number >> 16
        plain = values in _FLOATS and not scales and not group
        if not plain and not (values == DType.I8 and scales in _FLOATS and group >= 0):
            raise ValueError(f"{number} is not a valid format")
        return found

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """Return the format of values in this dtype."""
        return _plain(DType.of(dtype))

    @staticmethod
    def int8(scales: torch.dtype, columns: int = 0) -> Format:
        """Return the format of int8 values with a scale per so many columns, or per row."""
        if not 0 <= columns <= _MOST_COLUMNS:
            raise ValueError(f"groups of {columns} columns are too wide")
        return Format(DType.I8 | DType.of(scales) << 8 | columns << 16)

    @staticmethod
    def parsed(word: str) -> Format:
        """Return the format of this name. Raise ValueError with the expected form."""
        if word in _WORDS:
            return _WORDS[word]
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{', '.join(_WORDS)} or a format such as int8:64:bf16")
        columns, scales = found.groups()
        return Format.int8(DTYPES[scales], 0 if columns == _ROW else int(columns))

    def __str__(self) -> str:
        values, *scales = self.components
        if not scales:
            return values.dtype.word
        return f"int8:{scales[0].columns or _ROW}:{scales[0].dtype.word}"

    __repr__ = __str__

    @property
    def components(self) -> tuple[Component, ...]:
        """The tensors, values first."""
        return _components(self)

    @property
    def values(self) -> DType:
        """The element type of the values."""
        return self.components[0].dtype

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
        self, parts: Mapping[str, torch.Tensor], first: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of rows from their components, given by suffix.

        The columns begin with column `first` of the whole weight. Products of values and scales
        are rounded once, to `dtype`.
        """
        values, *scales = self.components
        found = parts[values.suffix]
        if not scales:
            return found.to(dtype)
        columns = torch.arange(first, first + found.shape[-1], device=found.device)
        each = scales[0].columns
        place = columns // each - first // each if each else torch.zeros_like(columns)
        return (found.float() * parts[scales[0].suffix].float()[..., place]).to(dtype)


def decoded(
    word: str, parts: Sequence[torch.Tensor], first: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of a weight from its components, given the name of its format."""
    stored = Format.parsed(word)
    named = {one.suffix: part for one, part in zip(stored.components, parts, strict=True)}
    return stored.decoded(named, first, dtype)


_FLOATS = (DType.F32, DType.BF16, DType.F16)


@cache
def _components(one: Format) -> tuple[Component, ...]:
    scales = one >> 8 & 255
    values = Component("", DType(one & 255))
    return (values, Component("_scale", DType(scales), one >> 16)) if scales else (values,)


@cache
def _plain(dtype: DType) -> Format:
    return Format(dtype)


FLOATS = tuple(map(_plain, _FLOATS))
"""The formats of weights that are stored as their values."""
_WORDS = {str(one): one for one in FLOATS}
