"""The native libraries: their sources, and the flags of each vector path.

One library has everything but kernels. The kernels of a vector path for values of one dtype are a
library of their own, which is built when it is first used.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tpcompile.cpp import CppLibrary
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Format
from tpcompile.vm.program import abi
from tpcompile.vm.program.c_rules import rules_header

_EXACT = ("-ffp-contract=off",)
"""Round each product before it is added: compilers would fuse only some of them."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_BF16 = (*_AVX512, "-mavx512bf16")
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "amx_bf16": (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _BF16,
    "avx512_vnni": _AVX512,
    "avx2": _AVX2,
    "portable": _EXACT,
}
"""The flags of each vector path, by name, fastest first."""


class _Shared(NamedTuple):
    """The paths whose source files a path uses."""

    few_bits: str
    """For weights in few bits, also with rounded activations."""
    prompts: str | None
    """For operations on many tokens, which are for bf16 alone."""


_SHARED = {
    "amx_bf16": _Shared("avx512_bf16", "amx_bf16"),
    "avx512_bf16": _Shared("avx512_bf16", "avx512_bf16"),
    "avx512_vnni": _Shared("avx512_vnni", "avx2"),
    "avx2": _Shared("avx2", "avx2"),
    "portable": _Shared("portable", None),
}
_OTHER_DTYPES = {"amx_bf16": "avx512_vnni", "avx512_bf16": "avx512_vnni"}
"""The path whose kernels serve dtypes other than bf16, if a path differs from it in bf16 alone."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMMON: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("interpreter", "checks", "paths", "asleep", "prompts", "scratch"), ()
)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library without kernels. It is built if the cache has none for this machine."""
    loaded = sources().load()
    loaded.tpc_path.restype = ctypes.c_char_p
    loaded.tpc_open.restype = ctypes.c_void_p
    loaded.tpc_refusal.restype = ctypes.c_char_p
    loaded.tpc_end.restype = ctypes.c_int64
    loaded.tpc_steps_done.restype = ctypes.c_int64
    loaded.tpc_read.restype = ctypes.c_double
    abi.check_version(loaded.tpc_abi_version(), "native")
    return loaded


def paths() -> list[str]:
    """Return the vector paths that this CPU has, fastest first. No kernels are built."""
    names = map(library().tpc_path, itertools.count())
    return [name.decode() for name in itertools.takewhile(bool, names)]


@functools.cache
def kernels(path: str, dtype: torch.dtype) -> ctypes.c_void_p:
    """Return the kernels of a vector path for values of a dtype; build them if needed.

    Functions of the library take them. The path must be one of `paths()`.
    """
    path = path_of_kernels(path, dtype)
    return _pointer(path, dtype, f"tpc_{path}")


def path_of_kernels(path: str, dtype: torch.dtype) -> str:
    """Return the path whose kernels serve a path for values of a dtype."""
    return path if dtype == torch.bfloat16 else _OTHER_DTYPES.get(path, path)


@functools.cache
def prompts(path: str) -> ctypes.c_void_p:
    """Return the operations on many tokens of a vector path; see `kernels`."""
    return _pointer(path, torch.bfloat16, f"tpc_prompts_{_SHARED[path].prompts}")


def _pointer(path: str, dtype: torch.dtype, symbol: str) -> ctypes.c_void_p:
    function = getattr(sources(path, dtype).load(), symbol)
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function())


@functools.cache
def has_kernel(path: str, dtype: torch.dtype, opcode: int, *formats: Format | None) -> bool:
    """Return whether a path has a kernel for values of a dtype, and for these formats if given.

    The formats are those of the values, the weight, norms and biases, and the cache; None for an
    absent operand.
    """
    if dtype not in _DTYPES:
        return False
    numbers = [0 if stored is None else int(stored) for stored in formats or (None,) * 4]
    return bool(library().tpc_has_kernel(kernels(path, dtype), opcode, *numbers))


def sources(path: str | None = None, dtype: torch.dtype | None = None) -> CppLibrary:
    """Return the description of the library of a vector path, or of the one that all paths use.

    Without a dtype, the library has kernels for all.
    """
    units = _COMMON if path is None else {**_units(path, dtype), "scratch": ()}
    if path is not None and dtype is not None:
        values = f"-DTPC_DTYPE={DType.of(dtype).word}"
        units = {name: (*flags, values) for name, flags in units.items()}
    return CppLibrary(
        name="native backend",
        sources=Path(__file__).parent / "sources",
        units=units,
        headers={"tpc_abi.h": abi.c_header(), "tpc_rules.h": rules_header()},
        instead='or compile with backend="torch"',
        takes="" if path is None else "up to a minute",
    )


def _units(path: str, dtype: torch.dtype | None) -> dict[str, tuple[str, ...]]:
    """Return the source files of the kernels of a vector path, and their flags."""
    few_bits, prompts = _SHARED[path]
    files = {path: path, f"few_bits_{few_bits}": few_bits, f"rounded_{few_bits}": few_bits}
    if prompts is not None and dtype in (None, torch.bfloat16):
        files[f"prompts_{prompts}"] = prompts
    return {file: _FLAGS[flags_of] for file, flags_of in files.items()}


def known() -> list[str]:
    """Return the vector paths that can be compiled for this type of CPU."""
    return list(_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["portable"]


def whole() -> CppLibrary:
    """Return the description of one library with the kernels of all known paths."""
    units = {name: flags for path in known() for name, flags in _units(path, None).items()}
    return replace(sources(), units={**_COMMON, **units})
