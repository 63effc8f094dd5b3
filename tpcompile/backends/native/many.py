"""Calls of the native library's operations on many tokens in bf16 (see sources/prompts.h)."""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from tpcompile.backends.native.build import library, paths, prompts


class Products(NamedTuple):
    """The products of a vector path."""

    packed: torch.dtype
    """The dtype of packed tokens."""
    rows: int
    """The most rows of a weight in an item."""
    together: int
    """The rows that are multiplied together: `kRows` of the path's source file."""
    faster: bool = True
    """Whether a product in bf16 is faster than torch's, which uses AMX where the CPU has it."""


PATHS = {
    "amx_bf16": Products(torch.bfloat16, 256, 32, faster=False),
    "avx512_bf16": Products(torch.bfloat16, 48, 6),
    "avx512_vnni": Products(torch.float32, 48, 6),
    "avx2": Products(torch.float32, 48, 6),
}
"""The vector paths that have the kernels."""


class Operation(IntEnum):
    """The operations, in the order of `TPC_MANY_KERNELS` in prompts_kernels.h."""

    NORM = 0
    ADD_NORM = 1
    SWIGLU = 2
    ROPE = 3
    APPEND = 4
    ATTENTION = 5
    PACK = 6
    LINEAR = 7
    PACK_ROUNDED = 8
    LINEAR_ROUNDED = 9
    GATE = 10
    GATED_NORM = 11
    CONVOLUTION = 12
    DELTA_RULE = 13
    PACK_EACH = 14
    LINEAR_EACH = 15
    PACK_ROUNDED_EACH = 16
    LINEAR_ROUNDED_EACH = 17
    MIX = 18


GRAIN = 1 << 14
"""The minimum number of values that a thread computes at a time."""
ADDRESS, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
"""The types of arguments."""


@functools.cache
def _path() -> str | None:
    """Return the fastest vector path of this CPU that has the kernels, or None."""
    return next((path for path in paths() if path in PATHS), None)


def chosen_path() -> str:
    """Return the path of a CPU that has the kernels."""
    path = _path()
    assert path is not None  # callers ask `takes` first
    return path


def available() -> bool:
    """Return whether this CPU has the kernels."""
    return _path() is not None


def takes(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels take these tensors: bf16 on the CPU, with adjacent values."""
    return available() and all(
        tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.stride(-1) == 1
        for tensor in tensors
    )


class Heads(ctypes.Structure):
    """`tpc::Heads` of the library."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, values: torch.Tensor) -> Heads:
        """Describe `values[tokens, width]` or `values[tokens, heads, width]`."""
        return cls(values.data_ptr(), values.stride(0), values.stride(-2))


def structure(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """Return the arguments of an operation: a structure of prompts.h."""
    return type("_Arguments", (ctypes.Structure,), {"_fields_": fields})


def fields_of(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Return several fields of one type."""
    return [(name, kind) for name in names]


def run(operation: Operation, arguments: ctypes.Structure, items: int, values: int) -> None:
    """Run an operation on items of `values` values each."""
    library().tpc_many(
        prompts(chosen_path()),
        ctypes.c_int32(operation),
        ctypes.byref(arguments),
        ctypes.c_int64(items),
        ctypes.c_int64(max(1, GRAIN // max(1, values))),
        ctypes.c_int32(torch.get_num_threads()),
    )
