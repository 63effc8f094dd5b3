"""Files and directories of results, which are there whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from tpcompile.errors import UsageError

_STAGE_FILE = re.compile(r"\d\d+-[a-z0-9-]+\.(txt|json|dot)")


def check_directory(directory: Path) -> None:
    """Refuse a place where a dump would overwrite something that is not a dump."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="Give a new or an empty directory")
    others = [e.name for e in sorted(directory.iterdir()) if not _STAGE_FILE.fullmatch(e.name)]
    if others:
        raise UsageError(
            f"The directory {directory} holds other things than a dump",
            got=others[0],
            expected="a new or empty directory, or one with an earlier dump, which is replaced",
        )


def write_stages(directory: Path, stages: Sequence[tuple[str, str]], suffix: str) -> list[Path]:
    """Write `00-capture.txt`, `01-canonicalize.txt`, …; an earlier dump there is replaced."""
    check_directory(directory)
    existed = directory.exists()
    names = [f"{number:02d}-{name}.{suffix}" for number, (name, _) in enumerate(stages)]
    try:
        home = directory if existed else directory.parent
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".stages-", dir=home) as outer:
            staging = Path(outer) / "whole"
            staging.mkdir()
            for name, (_, text) in zip(names, stages, strict=True):
                (staging / name).write_text(text, encoding="utf-8")
            if existed:
                _replace_files(directory, staging)
            else:
                staging.rename(directory)
    except OSError as error:
        raise UsageError(
            f"The stages cannot be written to {directory}",
            got=str(error),
            hint="Give a directory that can be written to",
        ) from error
    return [directory / name for name in names]


def check_file(path: Path) -> None:
    """Refuse a place where no file can be."""
    if os.path.isdir(path):  # as Path.is_dir, which raises if a name is too long
        raise UsageError(f"{path} is a directory", hint="Give the name of a file")
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(
            f"There is no directory {path.parent} for {path.name}", hint="Make it first"
        )


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """What `write` writes, in place of what was there."""
    check_file(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".file-", dir=path.absolute().parent) as outer:
            staging = Path(outer) / "whole"
            with staging.open("w", encoding="utf-8") as file:
                write(file)
            staging.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", got=str(error), hint="Give a place that can be written to"
        ) from error


def _replace_files(directory: Path, staging: Path) -> None:
    for old in directory.iterdir():
        if old.is_file():
            old.unlink()
    for new in staging.iterdir():
        new.rename(directory / new.name)
