"""Building the native library with the system's compiler, and its cache."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tpcompile.errors import UnsupportedError
from tpcompile.vm.program import abi

_SOURCES = Path(__file__).parent / "sources"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
_AMX = (*_AVX512, "-mamx-tile", "-mamx-bf16")
_X86: Mapping[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512_bf16": _AVX512,
    "amx_bf16": _AMX,
}
_LAST_LINES = 12
"""The number of lines of a compiler's output in an error."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the native library. It is built if the cache has none for this machine."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnsupportedError(
            "The native backend needs a C++ compiler, which was not found",
            expected=f"one of {', '.join(_COMPILERS)} on the PATH",
            hint='Install a C++ compiler, or compile with backend="torch"',
        )
    directory = _cache_directory()
    file = directory / f"{_key(compiler)}.so"
    if not file.exists():
        with _lock(directory):
            if not file.exists():  # another process may have built it meanwhile
                _build(compiler, file)
    _check_private(file)
    found = ctypes.CDLL(str(file))
    found.tpc_path.restype = ctypes.c_char_p
    found.tpc_open.restype = ctypes.c_void_p
    found.tpc_finish.restype = ctypes.c_int64
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


def _units() -> dict[str, tuple[str, ...]]:
    """Return the source files to compile, with their target flags."""
    vector = _X86 if platform.machine() in ("x86_64", "AMD64") else {}
    return {"interpreter": (), "portable": (), **vector}


def _key(compiler: str) -> str:
    """Return the hash of everything that the library is made from."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version)
    for file in sorted(_SOURCES.iterdir()):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    found.update(repr((abi.c_header(), _FLAGS, _units(), platform.machine())).encode())
    return found.hexdigest()[:32]


def _cache_directory() -> Path:
    """Return the directory of built libraries, which only its owner may write to."""
    directory = Path.home() / ".cache" / "tpcompile" / "native"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(
            f"The cache of the native backend cannot be created at {directory}",
            got=error.strerror or str(error),
            hint='Make it writable, or compile with backend="torch"',
        ) from error
    _check_private(directory)
    return directory


def _check_private(path: Path) -> None:
    """Raise if another user could have changed a file or directory."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsupportedError(
            f"{path} must be writable by its owner only",
            got=f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}",
            hint="Remove it; it is built again",
        )


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Let one process build at a time."""
    try:
        file = (directory / "lock").open("w")
    except OSError as error:
        raise _unwritable(directory, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unwritable(directory: Path, error: OSError) -> UnsupportedError:
    return UnsupportedError(
        f"The native library cannot be built in {directory}",
        got=error.strerror or str(error),
        hint='Make the directory writable, or compile with backend="torch"',
    )


def _build(compiler: str, file: Path) -> None:
    """Compile the sources next to `file`, and move the library there when it is complete."""
    sys.stderr.write("tpcompile: building the native backend, which takes about half a minute\n")
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=file.parent) as temporary:
            own = Path(temporary)
            (own / "tpc_abi.h").write_text(abi.c_header(), encoding="utf-8")
            units = _units()
            with ThreadPoolExecutor(len(units)) as pool:
                list(pool.map(lambda unit: _compile(compiler, own, *unit), units.items()))
            made = own / "library.so"
            objects = [str(own / f"{name}.o") for name in units]
            _run([compiler, "-shared", "-pthread", "-o", str(made), *objects])
            made.replace(file)
    except OSError as error:
        raise _unwritable(file.parent, error) from error


def _compile(compiler: str, own: Path, name: str, flags: tuple[str, ...]) -> None:
    source, made = str(_SOURCES / f"{name}.cpp"), str(own / f"{name}.o")
    _run([compiler, *_FLAGS, *flags, f"-I{own}", f"-I{_SOURCES}", "-c", source, "-o", made])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UnsupportedError(
            "The native backend cannot be built",
            where=" ".join(command),
            got="\n".join(lines[:_LAST_LINES]) or f"exit status {done.returncode}",
            hint='Install a compiler of C++17, or compile with backend="torch"',
        )
