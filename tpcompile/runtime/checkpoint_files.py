"""The files of a checkpoint: which tensor is in which, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tpcompile.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def files_of(directory: Path) -> dict[str, Path]:
    """The file of every tensor, from the index or from the headers of the files."""
    index = directory / INDEX
    if index.is_file():
        return _files_of_index(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise _no_safetensors(directory)
    found: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), path))
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
    return found


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            "The index of the checkpoint cannot be read", where=str(index), got=str(error)
        ) from error
    found = {name: index.parent / file for name, file in names.items()}
    missing = sorted({path.name for path in found.values() if not path.is_file()})
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks the file {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            where=str(index),
            expected="every file that the index names",
            hint="Get the missing files",
        )
    return found


def unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "A file of the checkpoint cannot be read",
        where=str(path),
        got=str(error),
        expected="a whole safetensors file",
        hint="It may be cut short: compare its size with the original and get it again",
    )


def size_of(path: Path) -> int | None:
    """In bytes; of a file that is gone, none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def changed(path: Path, opened: int) -> CheckpointError:
    """A file is read through a map of it: what is no longer there would kill the process."""
    found = size_of(path)
    return CheckpointError(
        "A file of the checkpoint changed while it was read",
        where=str(path),
        got="no file" if found is None else f"{found:,} bytes",
        expected=f"{opened:,} bytes, as when it was opened",
        hint="Load it again when nothing writes to it any more, and its disk is not full",
    )


def _no_safetensors(directory: Path) -> CheckpointError:
    old = sorted(p.name for p in directory.glob("*.bin"))
    if old:
        return CheckpointError(
            "The checkpoint is in the old PyTorch format",
            where=str(directory),
            got=", ".join(old[:3]),
            expected="safetensors files",
            hint="Convert it once: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR)",
        )
    return CheckpointError(
        "There are no weights to compile",
        where=str(directory),
        expected="*.safetensors beside the config.json, or random_weights=SEED",
    )
