"""Files and directories of results, which are there whole or not at all."""

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
    """Refuse a place where a dump would overwrite something that is not a dump."""
    if _status(directory) is None:
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="Give a new or an empty directory")
    others = [entry.name for entry in sorted(directory.iterdir()) if not _is_stage_file(entry)]
    if others:
        raise UsageError(
            f"The directory {directory} holds other things than a dump",
            got=others[0],
            expected="a new or empty directory, or one with an earlier dump, which is replaced",
        )


def _is_stage_file(path: Path) -> bool:
    """Whether an earlier dump wrote this; it writes regular files, no links or FIFOs."""
    return bool(_STAGE_FILE.fullmatch(path.name)) and stat.S_ISREG(path.lstat().st_mode)


def write_stages(directory: Path, stages: Sequence[tuple[str, str]], suffix: str) -> list[Path]:
    """Write `00-capture.txt`, `01-canonicalize.txt`, …; an earlier dump there is replaced."""
    check_directory(directory)
    place = Path(os.path.realpath(directory))  # a link stays: the dump goes to its target
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
            hint="Give a directory that can be written to",
        ) from error
    return [directory / name for name in names]


def check_file(path: Path) -> None:
    """Refuse a path that cannot name a file."""
    if os.path.isdir(path):  # as Path.is_dir, which raises if a name is too long
        raise UsageError(f"{path} is a directory", hint="Give the name of a file")
    _status(path)
    for place in (path.absolute(), Path(os.path.realpath(path))):
        if not os.path.isdir(place.parent):
            named = path if place == path.absolute() else place
            raise UsageError(
                f"There is no directory {named.parent} for {named.name}", hint="Make it first"
            )


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """Replace the contents of a file with the text that `write` writes.

    A regular file appears whole or stays as it was. A link is followed and stays a link. A
    device, a FIFO or another special file is written to in place.
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
    """The status of what the path leads to; None where nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:  # such as a loop of links, or a name that is too long
        raise _unwritable(path, error) from error


def _is_replaceable(path: Path) -> bool:
    """Whether a new regular file may take the place of what is there.

    Links such as /proc/self/fd/1 lead to files that have no path: these are written in place.
    """
    found = _status(path)
    if found is None:
        return True
    real = os.path.realpath(path)
    return stat.S_ISREG(found.st_mode) and os.path.exists(real) and os.path.samefile(path, real)


def _replace_file(target: Path, write: Callable[[TextIO], object]) -> None:
    with tempfile.TemporaryDirectory(prefix=".file-", dir=target.parent) as outer:
        staging = Path(outer) / "whole"
        with staging.open("w", encoding="utf-8") as file:
            write(file)
        if target.exists():
            shutil.copymode(target, staging)
        staging.replace(target)


def _open_existing(path: str, flags: int) -> int:
    """Open without O_CREAT: a special file that is gone must not come back as a regular one."""
    return os.open(path, flags & ~os.O_CREAT)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be written", got=str(error), hint="Give a place that can be written to"
    )


def _replace_files(directory: Path, staging: Path) -> None:
    for old in directory.iterdir():
        if old.is_file():
            old.unlink()
    for new in staging.iterdir():
        new.rename(directory / new.name)
