"""Formats: how a weight is stored, as one tensor or as several that make its values together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from tpcompile.ir.dtypes import DType, Named
from tpcompile.ir.layout import Interval
from tpcompile.ir.words import WORD_BITS, unpacked

_ROW, _OFFSETS, _ROUNDS = "row", "offsets", "a8"
_GRAIN = 16
_MOST_BLOCK = 128
_ROUNDS_BIT = 1 << 14
MOST_COLUMNS = (1 << 15) - 1
"""The maximum number of columns per group."""


PACKED, HIGH = "_packed", "_high"
SCALE, ZERO_POINT, MINIMUM = "_scale", "_zero_point", "_minimum"
SUPER_SCALE, SUPER_MINIMUM = "_super_scale", "_super_minimum"
"""The suffixes of components. That of values with one element per column is empty."""
_OF_GROUPS = (SCALE, ZERO_POINT, MINIMUM, SUPER_SCALE, SUPER_MINIMUM)


class Kind(Named):
    """The storage of a weight's values. The numbers are part of the binary interface."""

    F32 = DType.F32
    BF16 = DType.BF16
    F16 = DType.F16
    INT8 = DType.I8
    INT4 = 8
    """Words of eight columns: see `words.py`."""
    INT5 = 9
    """Such words of the lower four bits, and words of 32 columns with the highest bit."""
    INT6 = 10
    """Such words of the lower four bits, and words of 16 columns with the two highest bits."""
    FP8 = DType.F8_E4M3

    @property
    def suffix(self) -> str:
        """The suffix of the component that has the values."""
        return PACKED if self in _BITS else ""


class Scales(Named):
    """The factors of the numbers of a group, and the terms added to the products."""

    F32 = DType.F32
    BF16 = DType.BF16
    F16 = DType.F16
    F16MIN = 16
    """A scale and a minimum in float16, the latter of which is added."""
    SUPER = 17
    """A scale in int8, times one in float16 per 256 columns."""
    SUPERMIN = 18
    """The same with a minimum in int8, times one in float16 per 256 columns, which is subtracted.

    With minima, half of their range is added to the stored integers, so that none is negative."""

    @property
    def super(self) -> bool:
        """Whether 256 columns share a factor of their scales."""
        return self in (Scales.SUPER, Scales.SUPERMIN)

    @property
    def minima(self) -> bool:
        """Whether groups have a minimum."""
        return self in (Scales.F16MIN, Scales.SUPERMIN)


_SUPER = 256
"""The columns of a superblock."""


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
    """The storage of a weight, as a number that instructions have as an operand.

    A floating-point format has one component, the values. Its number is that of the element type.
    `int8:64:bf16` has the components values, in int8, and scales, in bf16; groups of 64 columns of
    a row share a scale, and `row` stands for all columns. `int4:64:bf16:offsets` has offsets too,
    one per scale: a weight is (value - offset) * scale. `int4:32:supermin` has other scales: see
    `Scales`. `fp8:128:f32` has values in 8-bit floating point. Groups are counted from the first
    column of the whole weight, also where ranks hold some of its columns. `int8:64:bf16:a8` is
    stored like `int8:64:bf16`, but linears round their inputs to int8 before they multiply them:
    see `rounded` in `quantize.py`.

    Bits 0 to 7 of the number are a `Kind`, bits 8 to 13 the `Scales`, bit 14 says whether inputs
    are rounded, bit 15 whether there are offsets, and bits 16 to 30 are the columns per group, 0
    for rows.
    """

    def __new__(cls, number: int) -> Format:
        """Return the format with this number. Raise ValueError for any other number."""
        instance = super().__new__(cls, number)
        if number not in _FLOATS and not _is_grouped(number):
            raise ValueError(f"{number} is not a valid format")
        return instance

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        return _plain(DType.of(dtype))

    @staticmethod
    def grouped(
        kind: Kind, scales: torch.dtype | Scales, columns: int = 0, *, offsets: bool = False
    ) -> Format:
        """Return the format of numbers with a scale per `columns` columns, or per row."""
        if not 0 <= columns <= MOST_COLUMNS:
            raise ValueError(f"groups of {columns} columns are too wide")
        scale = scales if isinstance(scales, Scales) else Scales(DType.of(scales))
        return Format(kind | scale << 8 | offsets << 15 | columns << 16)

    @staticmethod
    def int8(scales: torch.dtype, columns: int = 0, *, offsets: bool = False) -> Format:
        """Return the format of int8 values with such scales."""
        return Format.grouped(Kind.INT8, scales, columns, offsets=offsets)

    @staticmethod
    def int4(scales: torch.dtype, columns: int = 0, *, offsets: bool = False) -> Format:
        """Return the format of 4-bit values with such scales."""
        return Format.grouped(Kind.INT4, scales, columns, offsets=offsets)

    @staticmethod
    @cache
    def parsed(word: str) -> Format:
        """Return the format of this name. Raise ValueError with the expected form."""
        if word in _WORDS:
            return _WORDS[word]
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{', '.join(_WORDS)} or a format such as int8:64:bf16")
        kind, columns, scales, offsets, rounds = match.groups()
        stored = Format.grouped(
            Kind[kind.upper()],
            Scales[scales.upper()],
            0 if columns == _ROW else int(columns),
            offsets=offsets is not None,
        )
        return stored if rounds is None else stored.rounding()

    def __str__(self) -> str:
        if self.plain:
            return self.kind.word
        words = [self.kind.word, str(self.columns or _ROW), self.scales.word]
        return ":".join([*words, *[_OFFSETS] * self.offsets, *[_ROUNDS] * self.rounds])

    __repr__ = __str__

    @property
    def components(self) -> tuple[Component, ...]:
        """The tensors, values first."""
        return _components(self)

    @property
    def kind(self) -> Kind:
        """The storage of the values."""
        return Kind(self & 255)

    @property
    def scales(self) -> Scales:
        """The scales of a format that is not plain."""
        return Scales(self >> 8 & 63)

    @property
    def basic(self) -> bool:
        """Whether a group has a scale of its own, and integers are in one component."""
        plain = not (self.scales.super or self.scales.minima)
        return plain and self.kind in (Kind.INT8, Kind.INT4)

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

    @property
    def may_round(self) -> bool:
        """Whether linears may round their inputs: they multiply integers."""
        return self.kind in _INTEGERS

    def rounding(self, rounds: bool = True) -> Format:
        """Return this format of few bits, for linears that round their inputs, or do not."""
        return Format(self | _ROUNDS_BIT if rounds else self & ~_ROUNDS_BIT)

    @property
    def values(self) -> Component:
        return self.components[0]

    @property
    def plain(self) -> bool:
        """Whether the only component is the values themselves."""
        return len(self.components) == 1

    @property
    def grain(self) -> int:
        """The multiple of columns at which ranks may cut rows, also within a group."""
        return 1 if self.plain else _GRAIN

    def row_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of these columns of a row, including bytes shared with other columns."""
        return sum(component.row_bytes(start, stop) for component in self.components)

    def decoded(
        self, parts: Mapping[str, torch.Tensor], columns: Interval, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of rows from their components, given by suffix.

        The rows consist of these columns of the whole weight. Differences are exact, and products
        are computed in fp32 before they are rounded to `dtype`.
        """
        if self.plain:
            return parts[self.values.suffix].to(dtype)
        numbers = self._numbers(parts, columns).float()
        spread = {
            component.suffix: _spread(parts[component.suffix], component, columns)
            for component in self.components
            if component.suffix in _OF_GROUPS
        }
        scales = spread[SCALE]
        if self.scales.super:
            scales = spread[SUPER_SCALE] * scales
        if self.offsets:
            return ((numbers - spread[ZERO_POINT]) * scales).to(dtype)
        if not self.scales.minima:
            return (numbers * scales).to(dtype)
        products = (numbers + (1 << _BITS[self.kind] - 1)) * scales
        if self.scales.super:
            return (products - spread[SUPER_MINIMUM] * spread[MINIMUM]).to(dtype)
        return (products + spread[MINIMUM]).to(dtype)

    def _numbers(self, parts: Mapping[str, torch.Tensor], columns: Interval) -> torch.Tensor:
        """Return the numbers of these columns, before they are scaled."""
        if self.kind not in _BITS:
            return parts[self.values.suffix]
        start, stop = columns
        low, *high = (
            unpacked(parts[component.suffix], WORD_BITS // component.columns).narrow(
                -1, start % component.columns, stop - start
            )
            for component in self.components
            if component.suffix in (PACKED, HIGH)
        )
        if not high:
            return low
        return low + (1 << _LOW_BITS - 1) + (high[0] << _LOW_BITS)


_FLOATS = (DType.F32, DType.BF16, DType.F16)
_BITS = {Kind.INT4: 4, Kind.INT5: 5, Kind.INT6: 6}
"""The bits of integers that share words."""
_LOW_BITS = 4
_PACKED = Component(PACKED, DType.I32, WORD_BITS // _LOW_BITS)
_INTEGERS = (Kind.INT8, *_BITS)
_GROUPED = (*_INTEGERS, Kind.FP8)
_WORD = re.compile(
    rf"({'|'.join(kind.word for kind in _GROUPED)}):({_ROW}|[1-9][0-9]{{0,4}})"
    rf":({'|'.join(scales.word for scales in Scales)})(:{_OFFSETS})?(:{_ROUNDS})?"
)


def _is_grouped(number: int) -> bool:
    """Return whether a number is that of a format with scales."""
    kind, scales, columns = number & 255, number >> 8 & 63, number >> 16
    if kind not in _GROUPED or scales not in tuple(Scales) or not 0 <= columns <= MOST_COLUMNS:
        return False
    scale, offsets = Scales(scales), number >> 15 & 1
    if kind not in _INTEGERS and (scale.super or offsets or number & _ROUNDS_BIT):
        return False
    if (scale.super and (not columns or _SUPER % columns)) or (scale.minima and kind not in _BITS):
        return False
    return not offsets or scales in _FLOATS


def _spread(part: torch.Tensor, component: Component, columns: Interval) -> torch.Tensor:
    """Return the number of each column, in fp32, of a component with one per group."""
    start, stop = columns
    width = component.columns or stop
    places = torch.arange(start, stop, device=part.device) // width - start // width
    return part.float()[..., places]


@cache
def _components(stored: Format) -> tuple[Component, ...]:
    kind, columns = stored.kind, stored.columns
    components = [_PACKED if kind in _BITS else Component("", DType(kind))]
    high_bits = _BITS.get(kind, _LOW_BITS) - _LOW_BITS
    if high_bits:
        components.append(Component(HIGH, DType.I32, WORD_BITS // high_bits))
    if not stored >> 8 & 63:
        return tuple(components)
    scales = stored.scales
    names = (SCALE, MINIMUM) if scales.minima else (SCALE,)
    dtype = DType.I8 if scales.super else DType.F16 if scales.minima else DType(scales)
    components += [Component(name, dtype, columns) for name in names]
    if scales.super:
        supers = (SUPER_SCALE, SUPER_MINIMUM)[: len(names)]
        components += [Component(name, DType.F16, _SUPER) for name in supers]
    if stored.offsets:
        components.append(Component(ZERO_POINT, DType.I8, columns))
    return tuple(components)


@cache
def _plain(dtype: DType) -> Format:
    return Format(dtype)


FLOATS = tuple(map(_plain, _FLOATS))
"""The formats of weights that are stored as their values."""
FLOAT_DTYPES = tuple(dtype.torch for dtype in _FLOATS)
"""Their dtypes."""
_WORDS = {str(stored): stored for stored in FLOATS}
