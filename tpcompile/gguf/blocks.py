"""The contents of blocks of GGUF kinds, as components of formats of weights.

The functions take blocks as bytes, `[…, bytes]`, and return elements, `[…, elements]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.format import (
    HIGH,
    MINIMUM,
    PACKED,
    SCALE,
    SUPER_MINIMUM,
    SUPER_SCALE,
    Format,
    Kind,
    Scales,
)
from tpcompile.ir.words import packed

Reader = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contents:
    """The layout of a kind in memory."""

    format: Format
    parts: Mapping[str, Reader]
    """The elements of each component, by its suffix."""


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _signed(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return blocks[..., start:stop].view(torch.int8)


def _unsigned(blocks: torch.Tensor, start: int, stop: int, bits: int, count: int) -> torch.Tensor:
    """Return unsigned integers of this number of bits.

    The lowest bits of `count` bytes come first, then the next bits of the same bytes, and so on.
    """
    octets = blocks[..., start:stop]
    runs = octets.reshape(*octets.shape[:-1], -1, 1, count)
    places = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (runs >> places & (1 << bits) - 1).flatten(-3)


def _words(blocks: torch.Tensor, start: int, stop: int, bits: int, count: int) -> torch.Tensor:
    """Return the same integers as words of neighbours: see `words.py`."""
    integers = _unsigned(blocks, start, stop, bits, count)
    return packed(integers.view(torch.int8) - (1 << bits - 1), bits)


def _sixes(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minima, of 6 bits each."""
    octets = blocks[..., 4:16]
    low, middle, high = octets.reshape(*octets.shape[:-1], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    return scales.view(torch.int8), minima.view(torch.int8)


def _scales(blocks: torch.Tensor) -> torch.Tensor:
    return _sixes(blocks)[0]


def _minima(blocks: torch.Tensor) -> torch.Tensor:
    return _sixes(blocks)[1]


def _low(start: int, stop: int, count: int) -> dict[str, Reader]:
    """Return the part with the lower four bits."""
    return {PACKED: partial(_words, start=start, stop=stop, bits=4, count=count)}


def _high(start: int, stop: int, bits: int, count: int) -> dict[str, Reader]:
    """Return the part with the bits above the lower four ones."""
    return {HIGH: partial(_words, start=start, stop=stop, bits=bits, count=count)}


_SCALE_ONLY: dict[str, Reader] = {SCALE: partial(_half, start=0)}
_WITH_MINIMUM: dict[str, Reader] = {**_SCALE_ONLY, MINIMUM: partial(_half, start=2)}
_SUPER: dict[str, Reader] = {
    SCALE: _scales,
    MINIMUM: _minima,
    SUPER_SCALE: partial(_half, start=0),
    SUPER_MINIMUM: partial(_half, start=2),
}


def _grouped(kind: Kind, scales: Scales, columns: int, *parts: Mapping[str, Reader]) -> Contents:
    functions = {suffix: reader for part in parts for suffix, reader in part.items()}
    return Contents(Format.grouped(kind, scales, columns), functions)


CONTENTS: Mapping[GgufKind, Contents] = {
    GgufKind.Q8_0: _grouped(
        Kind.INT8, Scales.F16, 32, {"": partial(_signed, start=2, stop=34)}, _SCALE_ONLY
    ),
    GgufKind.Q4_0: _grouped(Kind.INT4, Scales.F16, 32, _low(2, 18, 16), _SCALE_ONLY),
    GgufKind.Q4_1: _grouped(Kind.INT4, Scales.F16MIN, 32, _low(4, 20, 16), _WITH_MINIMUM),
    GgufKind.Q5_0: _grouped(
        Kind.INT5, Scales.F16, 32, _low(6, 22, 16), _high(2, 6, 1, 1), _SCALE_ONLY
    ),
    GgufKind.Q5_1: _grouped(
        Kind.INT5, Scales.F16MIN, 32, _low(8, 24, 16), _high(4, 8, 1, 1), _WITH_MINIMUM
    ),
    GgufKind.Q4_K: _grouped(Kind.INT4, Scales.SUPERMIN, 32, _low(16, 144, 32), _SUPER),
    GgufKind.Q5_K: _grouped(
        Kind.INT5, Scales.SUPERMIN, 32, _low(48, 176, 32), _high(16, 48, 1, 32), _SUPER
    ),
    GgufKind.Q6_K: _grouped(
        Kind.INT6,
        Scales.SUPER,
        16,
        _low(0, 128, 64),
        _high(128, 192, 2, 32),
        {SCALE: partial(_signed, start=192, stop=208), SUPER_SCALE: partial(_half, start=208)},
    ),
}
"""The contents of the kinds that are read."""
