"""The contents of blocks of GGUF kinds: integers, scales, and the values that they stand for.

The functions take blocks as bytes, `[…, bytes]`, and return elements, `[…, elements]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.words import packed

Taken = Callable[[torch.Tensor], torch.Tensor]


def first_half(blocks: torch.Tensor) -> torch.Tensor:
    """Return the first two bytes of each block as a float16: its scale in most kinds."""
    return _halves(blocks, 0)


def q8_0_integers(blocks: torch.Tensor) -> torch.Tensor:
    """Return the integers, in int8."""
    return blocks[..., 2:].view(torch.int8)


def q4_0_words(blocks: torch.Tensor) -> torch.Tensor:
    """Return the integers as words of neighbours: see `words.py`."""
    return packed((_nibbles(blocks[..., 2:]) - 8).to(torch.int8), 4)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return the lower four bits of all bytes, then the higher ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of four bytes, the lowest of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (octets.unsqueeze(-1) >> places & 1).flatten(-2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return q8_0_integers(blocks).float() * first_half(blocks).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 2:]).float() - 8) * first_half(blocks).float()


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    least = _halves(blocks, 2).float()
    return _nibbles(blocks[..., 4:]).float() * first_half(blocks).float() + least


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    found = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return (found.float() - 16) * first_half(blocks).float()


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    least = _halves(blocks, 2).float()
    found = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return found.float() * first_half(blocks).float() + least


def _sixes(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minima of 6 bits each, in 12 bytes."""
    low, middle, high = octets.unflatten(-1, (3, 4)).unbind(-2)  # type: ignore[no-untyped-call]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    return scales, minima


def _with_minima(blocks: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """Return the values of eight groups of integers, `[…, 8, 32]`."""
    scales, minima = _sixes(blocks[..., 4:16])
    scale = first_half(blocks).float() * scales.float()
    least = _halves(blocks, 2).float() * minima.float()
    return (integers.float() * scale.unsqueeze(-1) - least.unsqueeze(-1)).flatten(-2)


def _groups(octets: torch.Tensor) -> torch.Tensor:
    """Return the nibbles of 128 bytes as eight groups: 32 lower ones, 32 higher ones, and so on."""
    return _nibbles(_apart(octets, 32)).flatten(-2).reshape(*octets.shape[:-1], 8, 32)


def _apart(octets: torch.Tensor, each: int) -> torch.Tensor:
    return octets.reshape(*octets.shape[:-1], -1, each)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _with_minima(blocks, _groups(blocks[..., 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = blocks[..., None, 16:48] >> places & 1
    return _with_minima(blocks, _groups(blocks[..., 48:]) | high << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(_apart(blocks[..., :128], 64))  # of each half, 64 lower ones and 64 higher ones
    places = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    high = (_apart(blocks[..., 128:192], 32).unsqueeze(-2) >> places & 3).flatten(-2)
    integers = (low | high << 4).flatten(-2).view(torch.int8) - 32
    scales = _halves(blocks, 208).float() * blocks[..., 192:208].view(torch.int8).float()
    return (_apart(integers, 16).float() * scales.unsqueeze(-1)).flatten(-2)


VALUES: Mapping[GgufKind, Taken] = {
    GgufKind.Q8_0: _q8_0,
    GgufKind.Q4_0: _q4_0,
    GgufKind.Q4_1: _q4_1,
    GgufKind.Q5_0: _q5_0,
    GgufKind.Q5_1: _q5_1,
    GgufKind.Q4_K: _q4_k,
    GgufKind.Q5_K: _q5_k,
    GgufKind.Q6_K: _q6_k,
}
"""The values of blocks, in float32, by kind."""
