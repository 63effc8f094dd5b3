"""Paths that hold no model of their own are recognised by their contents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tpcompile.errors import CheckpointError, UsageError
from tpcompile.frontend import config_of


def _adapter(directory: Path, **values: str) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(values))
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def _lora(directory: Path) -> Path:
    return _adapter(directory, peft_type="LORA", base_model_name_or_path="Qwen/Qwen3-0.6B")


def _written(directory: Path, name: str, data: bytes = b"") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _gguf_files(directory: Path) -> Path:
    for name in ("b-q8_0.gguf", "a-q4_0.gguf"):
        _written(directory, name, b"GGUF")
    return directory


PATHS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a LoRA": (
        _lora,
        r"is a LoRA adapter of Qwen/Qwen3-0\.6B.*Pass Qwen/Qwen3-0\.6B as MODEL, and the "
        r"directory of the adapter with --adapter {0}\.",
    ),
    "weights of a LoRA": (
        lambda directory: _lora(directory) / "adapter_model.safetensors",
        r"is a LoRA adapter of .*--adapter {0}\.",
    ),
    "another adapter": (
        lambda directory: _adapter(directory, peft_type="IA3"),
        "is an adapter of kind IA3 of the base model.*Pass the base model as MODEL",
    ),
    "a directory of GGUF files": (
        _gguf_files,
        r"directory of GGUF files.*a-q4_0\.gguf and 1 more.*as MODEL: {0}/a-q4_0\.gguf",
    ),
    "a GGUF file with another name": (
        lambda directory: _written(directory, "blob", b"GGUF\3"),
        r"is a GGUF file.*must end with \.gguf.*blob\.gguf",
    ),
    "a configuration": (
        lambda directory: _written(directory, "config.json", b"{}"),
        "is a file.*directory as MODEL: {0}",
    ),
    "weights alone": (
        lambda directory: _written(directory, "model.safetensors", b"weights"),
        "is a file of weights.*Pass {0} as MODEL",
    ),
    "steps of training": (
        lambda directory: _written(directory, "checkpoint-9/config.json").parents[1],
        "directories with one.*Found checkpoint-9.*as MODEL: {0}/checkpoint-9",
    ),
    "a directory of the hub's cache": (
        lambda directory: _written(directory, "snapshots/0a1b/config.json").parents[2],
        "directories with one.*as MODEL: {0}/snapshots/0a1b",
    ),
    "an empty directory": (lambda directory: directory, "contains no model.*config.json"),
}


@pytest.mark.parametrize("name", PATHS)
def test_what_a_path_holds_is_named(name: str, tmp_path: Path) -> None:
    make, message = PATHS[name]
    with pytest.raises(UsageError, match=message.format(tmp_path)):
        config_of(str(make(tmp_path)))


def test_a_damaged_adapter(tmp_path: Path) -> None:
    _written(tmp_path, "adapter_config.json", b"{")
    with pytest.raises(CheckpointError, match=r"adapter cannot be read.*invalid JSON"):
        config_of(str(tmp_path))
