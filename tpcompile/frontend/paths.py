"""Refusals of paths that hold no model of their own: adapters, weights without a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tpcompile.checkpoint_files import ADAPTER, ADAPTER_WEIGHTS
from tpcompile.errors import CheckpointError, CompileError, UsageError
from tpcompile.gguf.file import MAGIC
from tpcompile.json_files import JsonError, read_object, shortened

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_CONFIG = "config.json"


def no_model(path: Path) -> CompileError:
    """Return the error for an existing path that is not a directory with a config.json."""
    refusals = (refusal(path) for refusal in _REFUSALS)
    return next((error for error in refusals if error is not None), _nothing(path))


def _adapter(path: Path) -> CompileError | None:
    directory = (
        path.parent if path.name in (ADAPTER, ADAPTER_WEIGHTS, "adapter_model.bin") else path
    )
    file = directory / ADAPTER
    if not file.is_file():
        return None
    try:
        values = read_object(file)
    except (JsonError, OSError) as error:
        return CheckpointError("The adapter cannot be read", where=str(file), got=str(error))
    kind, base = values.get("peft_type"), values.get("base_model_name_or_path")
    model = shortened(base) if isinstance(base, str) and base else "the base model"
    name = "a LoRA adapter" if kind == "LORA" else f"an adapter of kind {shortened(str(kind))}"
    return UsageError(
        f"{path} is {name} of {model}, not a model",
        expected="a model with its own config.json",
        hint=f"Pass {model} as MODEL, and the directory of the adapter with --adapter {directory}",
    )


def _gguf(path: Path) -> CompileError | None:
    if path.is_file() and _starts_as_gguf(path):
        return UsageError(
            f"{path} is a GGUF file, and its name must end with .gguf",
            hint=f"Rename it to {path.name}.gguf, or pass a link of this name",
        )
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files:
        return None
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return UsageError(
        f"{path} is a directory of GGUF files",
        got=f"{files[0].name}{more}",
        hint=f"Pass one of the files as MODEL: {files[0]}",
    )


def _starts_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _weights_alone(path: Path) -> CompileError | None:
    if not path.is_file() or path.suffix not in _WEIGHTS:
        return None
    return UsageError(
        f"{path} is a file of weights, which does not describe its model",
        expected="the directory of the checkpoint, with a config.json",
        hint=f"Pass {path.parent} as MODEL",
    )


def _configuration(path: Path) -> CompileError | None:
    if not path.is_file() or path.name != _CONFIG:
        return None
    return UsageError(f"{path} is a file", hint=f"Pass its directory as MODEL: {path.parent}")


def _deeper(path: Path) -> CompileError | None:
    """Return the error for a directory of checkpoints, as training and the hub's cache make."""
    levels = (path.glob(f"{depth}{_CONFIG}") for depth in ("*/", "snapshots/*/"))
    directories = sorted({file.parent for files in levels for file in files})
    if not directories:
        return None
    names = ", ".join(directory.relative_to(path).as_posix() for directory in directories[:3])
    return UsageError(
        f"{path} contains no model, but directories with one",
        got=names + (f" and {len(directories) - 3} more" if len(directories) > 3 else ""),
        hint=f"Pass one of them as MODEL: {directories[0]}",
    )


def _nothing(path: Path) -> CompileError:
    return UsageError(
        f"{path} contains no model", expected=f"a directory with a {_CONFIG}, or a GGUF file"
    )


_REFUSALS: tuple[Callable[[Path], CompileError | None], ...] = (
    _adapter,
    _gguf,
    _configuration,
    _weights_alone,
    _deeper,
)
