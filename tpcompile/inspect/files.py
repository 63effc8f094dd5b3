"""Files and directories of results, written completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from tpcompile.errors import UsageError

_STAGE_FILE = re.compile(r"\d\d+-[a-z0-9-]+\.(txt|json|dot)")


def check_directory(directory: Path) -> None:
    """Refuse a directory with files that are not from an earlier dump."""
    if _status(directory) is None:
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="Give a new or an empty directory")
    foreign = [entry.name for entry in sorted(directory.iterdir()) if not _is_stage_file(entry)]
    if foreign:
        raise UsageError(
            f"The directory {directory} has files that are not from a dump",
            got=foreign[0],
            expected="a new or empty directory, or one with an earlier dump, which is replaced",
        )


def _is_stage_file(path: Path) -> bool:
    """Return whether an earlier dump may have written this: a regular file with a stage's name."""
    return bool(_STAGE_FILE.fullmatch(path.name)) and stat.S_ISREG(path.lstat().st_mode)


def write_stages(directory: Path, stages: Sequence[tuple[str, str]], suffix: str) -> list[Path]:
    """Write `00-capture.txt`, `01-canonicalize.txt`, …, and replace an earlier dump."""
    check_directory(directory)
    place = Path(os.path.realpath(directory))  # preserve a link: write to its target
    existed = place.exists()
    names = [f"{number:02d}-{name}.{suffix}" for number, (name, _) in enumerate(stages)]
    try:
        home = place if existed else place.parent
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".stages-", dir=home) as outer:
            staging = Path(outer) / "whole"
            staging.mkdir()
            for name, (_, text) in zip(names, stages, strict=True):
                (staging / name).write_text(text, encoding="utf-8")
            if existed:
                _replace_files(place, staging)
            else:
                staging.rename(place)
    except OSError as error:
        raise UsageError(
            f"The stages cannot be written to {directory}",
            got=str(error),
            hint="Give a writable directory",
        ) from error
    return [directory / name for name in names]


def check_file(path: Path) -> None:
    """Refuse a path that is a directory, or whose parent directory does not exist."""
    if os.path.isdir(path):  # Path.is_dir raises if a name is too long
        raise UsageError(f"{path} is a directory", hint="Give the name of a file")
    _status(path)
    for place in (path.absolute(), Path(os.path.realpath(path))):
        if not os.path.isdir(place.parent):
            named = path if place == path.absolute() else place
            raise UsageError(
                f"There is no directory {named.parent} for {named.name}", hint="Create it first"
            )


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """Replace the contents of a file with the text that `write` writes.

    A regular file is replaced completely, or stays unchanged if writing fails. A link is followed
    and stays a link. A device, a FIFO or another special file is written in place.
    """
    check_file(path)
    try:
        if _is_replaceable(path):
            _replace_file(Path(os.path.realpath(path)), write)
        else:
            with open(path, "w", encoding="utf-8", opener=_open_existing) as file:
                write(file)
    except OSError as error:
        raise _unwritable(path, error) from error


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file, following links, or None if there is no file."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:  # for example a cycle of links, or a name that is too long
        raise _unwritable(path, error) from error


def _is_replaceable(path: Path) -> bool:
    """Return whether a new regular file may replace the file at the path.

    The targets of links such as /proc/self/fd/1 may have no path; they are written in place.
    """
    status = _status(path)
    if status is None:
        return True
    real = os.path.realpath(path)
    return stat.S_ISREG(status.st_mode) and os.path.exists(real) and os.path.samefile(path, real)


def _replace_file(target: Path, write: Callable[[TextIO], object]) -> None:
    with tempfile.TemporaryDirectory(prefix=".file-", dir=target.parent) as outer:
        staging = Path(outer) / "whole"
        with staging.open("w", encoding="utf-8") as file:
            write(file)
        if target.exists():
            shutil.copymode(target, staging)
        staging.replace(target)


def _open_existing(path: str, flags: int) -> int:
    """Open without O_CREAT, which would replace a deleted special file with a regular one."""
    return os.open(path, flags & ~os.O_CREAT)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written", got=str(error), hint="Give a writable path")


def _replace_files(directory: Path, staging: Path) -> None:
    for old in directory.iterdir():
        if old.is_file():
            old.unlink()
    for new in staging.iterdir():
        new.rename(directory / new.name)
