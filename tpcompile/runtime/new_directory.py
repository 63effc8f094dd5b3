"""Directories that are created or updated with all of their files, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tpcompile.errors import UsageError


def check_new_directory(directory: str | Path) -> Path:
    """Return the absolute path; raise unless it is new or empty and files can be created in it."""
    target = _target(directory)
    try:
        if target.is_dir() and any(target.iterdir()):
            raise UsageError(
                f"The directory {directory} is not empty",
                hint="Choose a directory that does not exist, or empty this one",
            )
        if target.exists() and not target.is_dir():
            raise UsageError(f"{directory} must be a new or empty directory", got="a file")
        with _beside(target):
            return target
    except OSError as error:
        raise _unwritable(directory, error) from error


def _target(directory: str | Path) -> Path:
    """Return the absolute path without symbolic links; raise if it cannot be resolved."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(directory)  # raises on a cycle of symbolic links
    except OSError as error:
        raise _unwritable(directory, error) from error
    return Path(os.path.realpath(directory))


@contextlib.contextmanager
def new_directory(directory: str | Path) -> Iterator[Path]:
    """Yield a directory to write into; at the end of the body its files are at `directory`.

    If the body raises, also on Ctrl-C, no files are left over.
    """
    target = check_new_directory(directory)
    try:
        with _beside(target) as temporary:
            staging = temporary / "made"
            staging.mkdir()  # with the user's permissions; the temporary directory is private
            yield staging
            _place(staging, target)
    except OSError as error:
        raise _unwritable(directory, error) from error


@contextlib.contextmanager
def filled_directory(directory: str | Path, stale: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a directory to write into; at the end of the body its files move to `directory`.

    They replace files of the same names. Other files are removed if `stale(name)` is true, and
    kept otherwise. If the body raises, `directory` does not change.
    """
    target = _target(directory)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{directory} must be a directory", got="a file")
    try:
        with _beside(target) as temporary:
            staging = temporary / "made"
            staging.mkdir()
            yield staging
            if target.exists():
                _replace(staging, target, stale)
            else:
                _place(staging, target)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _replace(staging: Path, target: Path, stale: Callable[[str], bool]) -> None:
    written = {file.name for file in staging.iterdir()}
    taken = sorted(name for name in written if (target / name).is_dir())
    if taken:
        raise UsageError(f"{target / taken[0]} must be a file or not exist", got="a directory")
    for name in sorted(written):
        (staging / name).replace(target / name)
    for old in list(target.iterdir()):
        if old.name not in written and stale(old.name):
            old.unlink()


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a temporary directory in the file system of `target`.

    It is inside `target` if that exists, since `target` may be a mount point or the shell's working
    directory; otherwise inside the nearest parent that exists.
    """
    nearest = next(path for path in (target, *target.parents) if path.exists())
    with tempfile.TemporaryDirectory(prefix=".make-", dir=nearest) as temporary:
        yield Path(temporary)


def _place(staging: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
        return
    placed: list[Path] = []
    try:
        for file in sorted(staging.iterdir()):
            placed.append(target / file.name)
            file.rename(placed[-1])
    except BaseException:
        for path in placed:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _unwritable(directory: str | Path, error: OSError) -> UsageError:
    return UsageError(
        f"The directory {directory} cannot be written",
        got=f"{type(error).__name__}: {error.strerror or error}",
        hint="Choose a directory with write permission",
    )
