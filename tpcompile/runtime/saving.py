"""`save_pretrained`: writing a checkpoint in Hugging Face's format, one tensor at a time."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tpcompile.checkpoint_files import INDEX, SINGLE
from tpcompile.errors import UnsupportedError, UsageError, did_you_mean
from tpcompile.runtime.new_directory import filled_directory
from tpcompile.runtime.ranks.protocols import Ranks
from tpcompile.runtime.safetensors_files import SafetensorsWriter
from tpcompile.runtime.whole_weights import WholeWeights

_SHARDS = "model{suffix}.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "state_dict": (None,),
    "push_to_hub": (False,),
    "variant": (None,),
    "distributed_checkpoint": (False,),
    "safe_serialization": (True,),
    "save_function": (None,),
}
"""The supported values of Hugging Face's options."""
_WITHOUT_EFFECT = ("token", "save_peft_format", "save_original_format")
"""Ignored options: they concern hubs, adapters and renamed tensors."""

_FAILED, _GO, _NOTHING = range(3)
"""The status that rank 0 sends to the other processes that call the model."""


def refuse_save_options(options: Mapping[str, Any]) -> None:
    """Raise for the first option of `save_pretrained` that is not supported."""
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            known = (*_ONLY, *_WITHOUT_EFFECT, "is_main_process", "max_shard_size")
            raise UsageError(
                f"save_pretrained has no option {name!r}", hint=did_you_mean(name, known)
            )
        if not any(value is allowed for allowed in _ONLY[name]):
            raise UnsupportedError(
                f"A compiled model cannot be saved with {name}={_short(value)}",
                expected=f"{name}={_ONLY[name][0]!r}",
                hint="Save it to a directory, load that with Hugging Face and use its "
                "save_pretrained",
            )


def save_checkpoint(
    model: Any,
    weights: WholeWeights,
    ranks: Ranks,
    directory: str | os.PathLike[str],
    max_shard_size: int | str,
    *,
    main: bool,
) -> None:
    """Write a checkpoint that `from_pretrained` reads back bit for bit.

    If every rank is a process that calls the model, each calls this, and rank 0 writes.
    """
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise UsageError("save_directory must be a path", got=repr(directory))
    metas = weights.metas()
    if not getattr(model.config, "tie_word_embeddings", True):  # Hugging Face loads both names
        metas |= {alias: metas[name] for alias, name in weights.aliases.items()}
    files = split(metas, max_shard_size)
    tensors = weights.gather_all(metas, ranks)
    if ranks.front != 0:
        _follow(tensors, ranks, directory)
    elif not main:
        _tell(ranks, _NOTHING)
    else:
        _lead(model, files, metas, tensors, ranks, Path(directory))


def _lead(
    model: Any,
    files: Mapping[str, list[str]],
    metas: Mapping[str, torch.Tensor],
    tensors: Iterator[tuple[str, torch.Tensor]],
    ranks: Ranks,
    directory: Path,
) -> None:
    begun = False
    try:
        with filled_directory(directory, _is_weights) as staging:
            name = type(model).__name__
            write_settings(staging, model.config, model.dtype, name, model.generation_config)
            writer = begin_files(staging, files, metas, model.num_parameters())
            _tell(ranks, _GO)
            begun = True
            for name, tensor in tensors:
                writer.write(name, tensor.cpu())
    except Exception:
        if not ranks.closed and ranks.fronts > 1:
            for _ in tensors if begun else ():
                pass  # the other processes still wait in these gathers
            _tell(ranks, _FAILED)
        raise
    _tell(ranks, _GO)


def _follow(
    tensors: Iterator[tuple[str, torch.Tensor]], ranks: Ranks, directory: str | os.PathLike[str]
) -> None:
    """Join the gathers of the tensors that rank 0 writes."""
    status = _tell(ranks, _GO)
    if status == _GO:
        for _ in tensors:
            pass
        status = _tell(ranks, _GO)
    if status == _FAILED:
        raise UsageError(
            f"The directory {os.fspath(directory)} was not written",
            got="an error on rank 0, which writes all files",
            hint="See the error message of rank 0",
        )


def _tell(ranks: Ranks, status: int) -> int:
    """Return rank 0's status on every process; the status of other processes is ignored."""
    return int(ranks.broadcast(torch.tensor([status])))


def split(metas: Mapping[str, torch.Tensor], max_shard_size: int | str) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, split as Hugging Face does."""
    from huggingface_hub import split_state_dict_into_shards_factory

    number = isinstance(max_shard_size, int) and not isinstance(max_shard_size, bool)
    message = "max_shard_size must be a positive number of bytes, or a size such as '5GB'"
    if not isinstance(max_shard_size, str) and not (number and int(max_shard_size) > 0):
        raise UsageError(message, got=repr(max_shard_size))
    try:
        split = split_state_dict_into_shards_factory(
            dict(metas),
            get_storage_size=lambda tensor: int(tensor.nbytes),
            filename_pattern=_SHARDS,
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UsageError(message, got=f"{max_shard_size!r}: {error}") from error
    return dict(split.filename_to_tensors)


def write_settings(
    directory: Path, config: Any, dtype: torch.dtype, name: str, generation_config: Any
) -> None:
    """Write the configurations of a model of the class `name`, whose values have this dtype."""
    config = copy.deepcopy(config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [name]
    try:
        config.save_pretrained(directory)
        generation_config.save_pretrained(directory)
    except ValueError as error:
        raise UsageError(
            "The configuration cannot be saved",
            got="the error: " + " ".join(str(error).split()),
            hint="Correct model.config or model.generation_config and save again",
        ) from error


def begin_files(
    directory: Path, files: Mapping[str, list[str]], metas: Mapping[str, torch.Tensor], count: int
) -> SafetensorsWriter:
    """Write the index, if there are several files, and begin the files.

    `files` are the names of the tensors in each, and `count` is the number of parameters.
    """
    if len(files) > 1:
        _write_index(directory / INDEX, files, metas, count)
    of_files = {file: {name: metas[name] for name in files[file]} for file in files}
    return SafetensorsWriter(directory, of_files)


def _write_index(
    path: Path,
    files: Mapping[str, list[str]],
    metas: Mapping[str, torch.Tensor],
    count: int,
) -> None:
    index = {
        "metadata": {
            "total_parameters": count,
            "total_size": sum(tensor.nbytes for tensor in metas.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _is_weights(name: str) -> bool:
    """Return whether a file would be read as weights; such files are removed by the next save."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | str) else f"a {type(value).__name__}"
