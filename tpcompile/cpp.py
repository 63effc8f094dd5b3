"""C++ libraries built with the system's compiler on first use, and their cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
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
from dataclasses import dataclass, field
from pathlib import Path

from tpcompile.errors import UnsupportedError

_COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wno-psabi")
_LONGEST_S = 900.0
"""The time after which a compiler is assumed to hang: a build takes less than a minute."""
_REMEDIES = {
    errno.ENOSPC: "Free space on the disk",
    errno.EDQUOT: "Free space within your quota",
    errno.EROFS: "Make the file system writable",
    errno.EMFILE: "Close files, or raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Close files of other processes, or raise the limit of the system",
    errno.ENOMEM: "Free memory",
    errno.EAGAIN: "End other processes, or raise the limit of processes (ulimit -u)",
}
"""Remedies for failures of the machine, as opposed to the compiler, by error number."""
_LAST_LINES = 12
"""The number of lines of a compiler's output in an error."""


def _user_cache() -> Path:
    """Return the user's directory of caches: XDG_CACHE_HOME, or ~/.cache.

    As the XDG specification says, a relative path in the variable is ignored.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return directory if directory.is_absolute() else Path.home() / ".cache"


@dataclass(frozen=True)
class CppLibrary:
    """A shared library, named by the hash of everything that it is made from."""

    name: str
    """The subject of errors, such as `native backend`."""
    sources: Path
    """The directory of the sources and headers."""
    units: Mapping[str, tuple[str, ...]]
    """The source files to compile, without `.cpp`, and the flags of each."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The text of generated headers, by file name."""
    instead: str = ""
    """The alternative that errors suggest, such as `or compile with backend="torch"`."""
    takes: str = ""
    """The duration of a build, for the message to the user; empty for no message."""

    def load(self, file: Path | None = None) -> ctypes.CDLL:
        """Load the library from `file`, by default from the cache, where it is built if needed."""
        file = file or self.built()
        try:
            return ctypes.CDLL(str(file))
        except OSError as error:
            hint = _remedy(str(error)) or f"Remove {file} to build it again"
            raise self._refused("cannot be loaded", got=str(error), hint=hint) from error

    def built(self) -> Path:
        """Return the file of the library, which is built if it is not in the cache."""
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            raise UnsupportedError(
                f"The {self.name} needs a C++ compiler, which was not found",
                expected=f"one of {', '.join(_COMPILERS)} on the PATH",
                hint=self._hint("Install a C++ compiler"),
            )
        directory = self._cache_directory()
        try:
            file = directory / f"{self.key(compiler)}.so"
            if not _is_whole(file):
                with self._lock(directory):
                    if not _is_whole(file):  # another process may have built it meanwhile
                        self._build(compiler, file)
            _check_private(file)
        except OSError as error:
            raise self._unwritable(directory, error) from error
        return file

    def key(self, compiler: str) -> str:
        """Return the hash of everything that the library is made from."""
        digest = hashlib.sha256(self._run([compiler, "--version"]).encode())
        for file in sorted(self.sources.iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        headers, units = sorted(self.headers.items()), list(self.units.items())
        digest.update(repr((headers, FLAGS, units, platform.machine())).encode())
        return digest.hexdigest()[:32]

    def compile_unit(self, compiler: str, directory: Path, name: str) -> Path:
        """Compile one source file; return the object file. The headers must be in `directory`."""
        source, object_file = self.sources / f"{name}.cpp", directory / f"{name}.o"
        flags = [*FLAGS, *self.units[name], f"-I{directory}", f"-I{self.sources}"]
        self._run([compiler, *flags, "-c", str(source), "-o", str(object_file)])
        return object_file

    def write_headers(self, directory: Path) -> None:
        """Write the generated headers."""
        for name, text in self.headers.items():
            (directory / name).write_text(text, encoding="utf-8")

    def _build(self, compiler: str, file: Path) -> None:
        """Compile the sources next to `file`, and move the library there when it is complete."""
        if self.takes and sys.stderr is not None:
            sys.stderr.write(f"tpcompile: building the {self.name}, which takes {self.takes}\n")
        with tempfile.TemporaryDirectory(prefix="build-", dir=file.parent) as temporary:
            directory = Path(temporary)
            self.write_headers(directory)
            with ThreadPoolExecutor(len(self.units)) as pool:
                object_files = list(
                    pool.map(lambda n: self.compile_unit(compiler, directory, n), self.units)
                )
            library, checksum = directory / "library.so", directory / "checksum"
            objects = map(str, object_files)
            self._run([compiler, "-shared", "-pthread", "-o", str(library), *objects, "-ldl"])
            checksum.write_text(_checksum(library), encoding="ascii")
            library.replace(file)
            checksum.replace(_checksum_file(file))

    def _cache_directory(self) -> Path:
        """Return the directory of built libraries, which only its owner may write to."""
        try:
            directory = _user_cache() / "tpcompile" / "native"
        except RuntimeError as error:
            raise self._refused("has no directory for its cache", got=str(error)) from error
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UnsupportedError(
                f"The cache of the {self.name} cannot be created at {directory}",
                got=error.strerror or str(error),
                hint=self._hint(_REMEDIES.get(error.errno or 0, "Make it writable")),
            ) from error
        _check_private(directory)
        return directory

    @contextlib.contextmanager
    def _lock(self, directory: Path) -> Iterator[None]:
        """Let one process build at a time."""
        with (directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _run(self, command: list[str]) -> str:
        """Run a compiler, whose messages are in English, and return its output."""
        where, environment = " ".join(command), {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_LONGEST_S,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            message, hint = f"no end within {_LONGEST_S:g} s", "Check that the compiler works"
            raise self._refused("cannot be built", where, message, hint) from error
        except OSError as error:
            hint = _REMEDIES.get(error.errno or 0, "")
            raise self._refused("cannot be built", where, str(error), hint) from error
        if done.returncode:
            whole = done.stderr or done.stdout
            lines = whole.strip().splitlines()
            message = "\n".join(lines[:_LAST_LINES]) or f"exit status {done.returncode}"
            raise self._refused("cannot be built", where, message, _remedy(whole))
        return done.stdout

    def _refused(
        self, problem: str, where: str = "", got: str = "", hint: str = ""
    ) -> UnsupportedError:
        hint = self._hint(hint or "Install a compiler of C++17")
        return UnsupportedError(f"The {self.name} {problem}", where=where, got=got, hint=hint)

    def _unwritable(self, directory: Path, error: OSError) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.name} cannot be built in {directory}",
            got=error.strerror or str(error),
            hint=self._hint(_REMEDIES.get(error.errno or 0, "Make the directory writable")),
        )

    def _hint(self, do: str) -> str:
        return f"{do}, {self.instead}" if self.instead else do


def _remedy(message: str) -> str:
    """Return what to do about a failure of the machine that a message tells, or nothing."""
    known = (do for number, do in _REMEDIES.items() if os.strerror(number) in message)
    return next(known, "")


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_whole(library: Path) -> bool:
    """Return whether a library is there, and has the checksum that was stored when it was built.

    A library that is damaged would end the process by a signal when it is loaded or called.
    """
    try:
        return _checksum_file(library).read_bytes() == _checksum(library).encode()
    except FileNotFoundError:
        return False


def _check_private(path: Path) -> None:
    """Raise if another user could have changed a file or directory."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsupportedError(
            f"{path} must be writable by its owner only",
            got=f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
            hint="Remove it; it is built again",
        )
