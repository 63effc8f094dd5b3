"""The kinds of tensors in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import torch


class Block(NamedTuple):
    """The consecutive elements of a row that are stored together."""

    columns: int
    bytes: int


class GgufKind(IntEnum):
    """The storage of a tensor, by the numbers of the format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    BF16 = 30

    @property
    def block(self) -> Block:
        """The size of a block: one element for plain kinds."""
        return _BLOCKS[self]


_BLOCKS = {
    GgufKind.F32: Block(1, 4),
    GgufKind.F16: Block(1, 2),
    GgufKind.BF16: Block(1, 2),
    GgufKind.F64: Block(1, 8),
    GgufKind.I8: Block(1, 1),
    GgufKind.I16: Block(1, 2),
    GgufKind.I32: Block(1, 4),
    GgufKind.I64: Block(1, 8),
    GgufKind.Q4_0: Block(32, 18),
    GgufKind.Q4_1: Block(32, 20),
    GgufKind.Q5_0: Block(32, 22),
    GgufKind.Q5_1: Block(32, 24),
    GgufKind.Q8_0: Block(32, 34),
    GgufKind.Q2_K: Block(256, 84),
    GgufKind.Q3_K: Block(256, 110),
    GgufKind.Q4_K: Block(256, 144),
    GgufKind.Q5_K: Block(256, 176),
    GgufKind.Q6_K: Block(256, 210),
}

PLAIN: Mapping[GgufKind, torch.dtype] = {
    GgufKind.F32: torch.float32,
    GgufKind.F16: torch.float16,
    GgufKind.BF16: torch.bfloat16,
}
"""The dtypes of kinds whose elements are values."""
