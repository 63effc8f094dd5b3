"""The native library: its sources, and the flags of each vector path."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping
from pathlib import Path

from tpcompile.cpp import CppLibrary
from tpcompile.vm.program import abi
from tpcompile.vm.program.c_rules import rules_header

_EXACT = ("-ffp-contract=off",)
"""Each product is rounded before it is added: compilers would fuse them in some places only."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
_AMX = (*_AVX512, "-mamx-tile", "-mamx-bf16")
_X86: Mapping[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512_bf16": _AVX512,
    "amx_bf16": _AMX,
    "prompts": (),
    "prompts_avx2": _AVX2,
    "prompts_avx512_bf16": _AVX512,
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the native library. It is built if the cache has none for this machine."""
    found = sources().load()
    found.tpc_path.restype = ctypes.c_char_p
    found.tpc_open.restype = ctypes.c_void_p
    found.tpc_refusal.restype = ctypes.c_char_p
    found.tpc_end.restype = ctypes.c_int64
    found.tpc_steps_done.restype = ctypes.c_int64
    found.tpc_read.restype = ctypes.c_double
    abi.check_version(found.tpc_abi_version(), "native")
    return found


def paths() -> list[str]:
    """Return the vector paths that this CPU has, fastest first."""
    names = iter(lambda: library().tpc_path(len(found)), None)
    found: list[str] = []
    for name in names:
        found.append(name.decode())
    return found


@functools.cache
def has_kernel(opcode: int) -> bool:
    """Return whether every vector path has a kernel for this opcode."""
    return bool(library().tpc_has_kernel(opcode))


def sources() -> CppLibrary:
    """Return the description of the library."""
    vector = _X86 if platform.machine() in ("x86_64", "AMD64") else {}
    return CppLibrary(
        name="native backend",
        sources=Path(__file__).parent / "sources",
        units={
            "interpreter": (),
            "checks": (),
            "paths": (),
            "asleep": (),
            "portable": _EXACT,
            **vector,
        },
        headers={"tpc_abi.h": abi.c_header(), "tpc_rules.h": rules_header()},
        instead='or compile with backend="torch"',
        takes="about half a minute",
    )
