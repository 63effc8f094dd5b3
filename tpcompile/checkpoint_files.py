"""The files of a checkpoint: the file of each tensor, and errors for invalid files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tpcompile.errors import CheckpointError
from tpcompile.json_files import JsonError, read_object, shortened

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_TEXT_MODEL, _OF_TEXT_MODEL = "model.", "model.language_model."
"""The prefix of a text model's names in its own checkpoint, and in one with a vision model."""
_INDEX_END = ".safetensors.index.json"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def files_of(directory: Path, chosen: Any = None) -> dict[str, Path]:
    """Map every tensor to its file; of several sets of files, use the one Hugging Face reads.

    `chosen` is `transformers_weights` of the configuration: the file to read, or its index.
    """
    _refuse_other_kinds(directory)
    weights = _weights_file(directory, chosen)
    if weights.name.endswith(_INDEX_END):
        return _files_of_index(directory, weights)
    return dict.fromkeys(_names_in(weights), weights)


def adapter_files(directory: Path) -> dict[str, Path]:
    """Map every tensor of an adapter to its file."""
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"The adapter lacks the file {ADAPTER_WEIGHTS}",
            where=str(directory),
            hint="Save it again with peft, which writes safetensors files",
        )
    return dict.fromkeys(_names_in(path), path)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Map the names of a text model's tensors to the names under which they are stored.

    They differ in a checkpoint that also holds a vision model.
    """
    return {name.replace(_OF_TEXT_MODEL, _TEXT_MODEL, 1): name for name in stored}


def names_of_module(name: str) -> list[str]:
    """Return the names that a configuration may have for a module of a text model.

    One is that of the module; the other has it in a checkpoint that also holds a vision model.
    """
    if not name.startswith(_TEXT_MODEL):
        return [name]
    return [name, _OF_TEXT_MODEL + name.removeprefix(_TEXT_MODEL)]


def _weights_file(directory: Path, chosen: Any) -> Path:
    """Return the chosen safetensors file or index; by default the single file, else the index."""
    if chosen is not None:
        return _chosen_file(directory, chosen)
    for name in (SINGLE, INDEX):
        if os.path.isfile(directory / name):
            return directory / name
    raise _no_safetensors(directory)


def _chosen_file(directory: Path, chosen: Any) -> Path:
    where = f"{directory / 'config.json'}, transformers_weights"
    if not isinstance(chosen, str) or not chosen.endswith((".safetensors", _INDEX_END)):
        raise CheckpointError(
            "transformers_weights must name a safetensors file or its index",
            where=where,
            got=shortened(repr(chosen)),
            expected=f"a name such as {SINGLE} or {INDEX}",
        )
    return _file_named(directory, chosen, where)


def _file_named(directory: Path, name: str, where: str) -> Path:
    """Return the file that a configuration or an index names; it must be inside the directory.

    Only the name is checked, not the target of a link: in the hub's cache every file is a link.
    """
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise CheckpointError(
            "A file of the checkpoint must be inside its directory",
            where=where,
            got=shortened(name),
            expected="a relative path without ..",
        )
    if not os.path.isfile(directory / name):
        raise CheckpointError(
            f"The checkpoint lacks the file {shortened(name)}",
            where=where,
            expected="every file that it names",
            hint="Download the missing files",
        )
    return directory / name


def _files_of_index(directory: Path, index: Path) -> dict[str, Path]:
    """Map every tensor to its file by the index, whose paths are relative to `directory`."""
    mapping = _weight_map(index)
    where = str(index)
    files = {name: _file_named(directory, name, where) for name in dict.fromkeys(mapping.values())}
    paths: dict[str, Path] = {}
    for path in files.values():
        for name in _names_in(path):
            if name in paths:
                raise _stored_twice(name, paths[name], path)
            paths[name] = path
    for name, file in mapping.items():
        if paths.get(name) != files[file]:
            raise CheckpointError(
                f"The index names a tensor that its file lacks: {shortened(name)}",
                where=str(files[file]),
                hint="The index and the files must be of the same checkpoint: download both again",
            )
    return paths


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_object(index).get("weight_map")
    except (JsonError, OSError) as error:
        raise CheckpointError(
            "The index of the checkpoint cannot be read", where=str(index), got=str(error)
        ) from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            "The index of the checkpoint must hold an object named weight_map",
            where=str(index),
            got=shortened(repr(weight_map)),
            expected="an object that maps each tensor to its file",
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"The index must map {shortened(name)} to a file name",
                where=str(index),
                got=shortened(repr(file)),
            )
    return weight_map


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error


def _refuse_other_kinds(directory: Path) -> None:
    """Raise if Hugging Face would load additional or other tensors from the directory."""
    if os.path.isfile(directory / ADAPTER):
        raise CheckpointError(
            "The directory holds an adapter, which is not merged into the weights",
            where=str(directory),
            got=ADAPTER,
            hint="Pass the base model, and this directory as adapter=DIR; or load both with peft, "
            "call merge_and_unload() and save the result",
        )
    names = (path.name for path in directory.glob("shard-*.safetensors"))
    shards = [name for name in names if _DISTRIBUTED.fullmatch(name)]
    if shards:
        raise CheckpointError(
            "The directory must not hold a distributed checkpoint: Hugging Face reads it first",
            where=str(directory),
            got=min(shards),
            expected=f"{SINGLE}, or {INDEX} with its files",
        )


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that safetensors cannot read."""
    return CheckpointError(
        "A file of the checkpoint cannot be read",
        where=str(path),
        got=f"the error: {error}",
        expected="a complete safetensors file",
        hint="It may be truncated: compare its size with the original and download it again",
    )


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def changed(path: Path, opened: int) -> CheckpointError:
    """Return the error for a changed file: reading a truncated memory map kills the process."""
    size = size_of(path)
    return CheckpointError(
        "A file of the checkpoint changed while it was being read",
        where=str(path),
        got="no file" if size is None else f"{size:,} bytes",
        expected=f"{opened:,} bytes, as when it was opened",
        hint="Make sure that no process writes to it and its disk is not full, then load it again",
    )


def _stored_twice(name: str, first: Path, second: Path) -> CheckpointError:
    return CheckpointError(
        f"Two files of the checkpoint hold the tensor {shortened(name)}",
        where=str(second),
        got=f"{first.name} and {second.name}",
        expected="each tensor in exactly one file",
        hint="The directory may hold files of another checkpoint: download it again",
    )


def _no_safetensors(directory: Path) -> CheckpointError:
    """Return the error that names the files found: an old format, or unsupported names."""
    wanted = f"{SINGLE}, or {INDEX} with its files"
    old, other = (
        sorted(path.name for path in directory.glob(f"*.{end}")) for end in ("bin", "safetensors")
    )
    if other:
        return CheckpointError(
            "No safetensors file has a name that Hugging Face reads",
            where=str(directory),
            got=", ".join(other[:3]),
            expected=wanted,
            hint="Download the index, rename the file, or name it in the config.json: "
            f'"transformers_weights": "{other[0]}"',
        )
    if old:
        return CheckpointError(
            "The checkpoint is in the old PyTorch format",
            where=str(directory),
            got=", ".join(old[:3]),
            expected=wanted,
            hint="Convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
        )
    return CheckpointError(
        "The directory holds no weights to compile",
        where=str(directory),
        expected=f"{wanted} next to the config.json, or random_weights=SEED",
    )
