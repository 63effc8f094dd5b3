"""Element types, with their names in text and their numbers in the binary interface."""

from __future__ import annotations

from enum import IntEnum

import torch

from tpcompile.errors import UnsupportedError


class Named(IntEnum):
    """Numbers of the binary interface, which have names in text."""

    @property
    def word(self) -> str:
        """The name in text: `bf16` for BF16."""
        return self.name.lower()


class DType(Named):
    """The element types of buffers. The numbers are part of the binary interface."""

    F32 = 1
    BF16 = 2
    F16 = 3
    I32 = 4
    I64 = 5
    I1 = 6
    I8 = 7
    F8_E4M3 = 11

    @staticmethod
    def of(dtype: torch.dtype) -> DType:
        """Return the element type of a torch dtype."""
        if dtype not in _OF:
            raise UnsupportedError(
                "Programs do not support buffers of this dtype",
                got=str(dtype),
                expected=", ".join(map(str, _OF)),
            )
        return _OF[dtype]

    @property
    def torch(self) -> torch.dtype:
        return _TORCH[self]

    @property
    def itemsize(self) -> int:
        """The bytes per element."""
        return self.torch.itemsize


_TORCH = {
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.I1: torch.bool,
    DType.I8: torch.int8,
    DType.F8_E4M3: torch.float8_e4m3fn,
}
_OF = {dtype: number for number, dtype in _TORCH.items()}
DTYPES = {number.word: dtype for number, dtype in _TORCH.items()}
"""The dtypes by their names in text."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in text; that of torch if programs have no such buffers."""
    return _OF[dtype].word if dtype in _OF else str(dtype).removeprefix("torch.")
