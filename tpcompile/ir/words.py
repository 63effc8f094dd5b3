"""Integers of 1, 2, 4 or 8 bits, packed in int32 words.

A word has the neighbours of a row, the first in its lowest bits. An integer of b bits is stored
as its value + 2 ** (b - 1). The bits of a last word that are left over are 0; they are not read.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch.nn.functional import pad

WORD_BITS = 32


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of each row of words, in int8, with the unused ones of the last word."""
    octets = _viewed(words, torch.uint8)  # of a word, the lowest first
    if bits == 8:
        return (octets ^ 128).view(torch.int8)
    parts = [octets >> place & (1 << bits) - 1 for place in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2).view(torch.int8) - (1 << bits - 1)


def packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of each row of integers, which are in int8."""
    left_over = -integers.shape[-1] % (WORD_BITS // bits)
    octets = pad(integers.contiguous().view(torch.uint8) + (1 << bits - 1), (0, left_over))
    per_octet = 8 // bits
    parts = (octets[..., part::per_octet] << part * bits for part in range(per_octet))
    return _viewed(reduce(torch.bitwise_or, parts), torch.int32)


def _viewed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of each row as elements of another size."""
    *outer, columns = rows.shape
    # The strides of dimensions of extent 1 may be anything, also if a tensor is contiguous.
    flat = rows.contiguous().as_strided((rows.numel(),), (1,)).view(dtype)
    return flat.view(*outer, columns * rows.itemsize // dtype.itemsize)
