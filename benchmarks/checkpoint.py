"""Checkpoints with random weights of any size, generated one tensor at a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tpcompile.frontend import capture
from tpcompile.runtime.checkpoint import INDEX
from tpcompile.runtime.weights import RandomWeights

FILE_BYTES = 256 * 1000**2
"""The size at which a file is written. The writer needs this much memory plus one tensor."""


_ABOUT = "sizes.json"
"""The file with the sizes of a checkpoint that is kept."""


@dataclass(frozen=True)
class RandomCheckpoint:
    """A checkpoint with random weights, and its sizes."""

    directory: Path
    layers: int
    vocabulary: int
    dtype: torch.dtype
    weight_bytes: int
    largest: tuple[int, int]
    """The number of rows of the largest tensor, and the bytes of one row."""
    embedding_bytes: int = 0
    """The bytes of an embedding that is not tied to the head: a step reads a row per token."""

    @property
    def weights_read(self) -> int:
        """The number of weights that a decode step reads."""
        return (self.weight_bytes - self.embedding_bytes) // self.dtype.itemsize

    def largest_slice(self, tp: int) -> int:
        """Return the bytes of the largest part that one of `tp` ranks reads at once."""
        rows, bytes_of_row = self.largest
        return -(-rows // tp) * bytes_of_row


@contextmanager
def random_checkpoint(
    model: str, seed: int = 0, dtype: torch.dtype | None = None
) -> Iterator[RandomCheckpoint]:
    """Write the preset with random weights to a temporary directory, and delete it afterwards."""
    with tempfile.TemporaryDirectory(prefix="tpcompile-benchmark-") as directory:
        yield write_checkpoint(Path(directory), model, seed, dtype)


def kept_checkpoint(directory: Path, model: str, dtype: torch.dtype) -> RandomCheckpoint:
    """Return the preset's checkpoint with random weights in `directory`; write it only once."""
    about = directory / _ABOUT
    if about.exists():
        saved = json.loads(about.read_text())
        saved["largest"] = tuple(saved["largest"])
        return RandomCheckpoint(directory=directory, dtype=dtype, **saved)
    directory.mkdir(parents=True, exist_ok=True)
    written = write_checkpoint(directory, model, dtype=dtype)
    sizes = {f.name: getattr(written, f.name) for f in fields(written)}
    del sizes["directory"], sizes["dtype"]
    about.write_text(json.dumps(sizes))  # last, so that an unfinished checkpoint is written again
    return written


def write_checkpoint(
    directory: Path, model: str, seed: int = 0, dtype: torch.dtype | None = None
) -> RandomCheckpoint:
    """Write the preset's configuration and random weights, in several files with an index.

    The default dtype is that of the preset.
    """
    captured = capture(f"preset:{model}", dtype=dtype)
    weights = RandomWeights(captured, seed)
    dtype = next(iter(captured.graph.parameters())).dtype
    tensors = captured.tensors
    total = sum(prod(t.shape) * dtype.itemsize for t in tensors.values())
    free = shutil.disk_usage(directory).free
    if free < 1.1 * total:
        raise OSError(
            f"{model} needs {total / 1e9:.1f} GB; {directory} has {free / 1e9:.1f} GB free"
        )
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    captured.config.architectures = [classes[type(captured.config)].__name__]  # servers ask for it
    captured.config.save_pretrained(directory)
    where: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    for name in tensors:
        held[name] = weights.whole(name)
        if sum(t.nbytes for t in held.values()) >= FILE_BYTES:
            where |= _write(directory, held, len(set(where.values())))
            held = {}
    where |= _write(directory, held, len(set(where.values()))) if held else {}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    largest = max((t.shape for t in tensors.values()), key=prod)
    return RandomCheckpoint(
        directory,
        captured.config.num_hidden_layers,
        captured.config.vocab_size,
        dtype,
        total,
        (largest[0], prod(largest[1:]) * dtype.itemsize),
        0 if captured.config.tie_word_embeddings else _embedding_bytes(captured.config, dtype),
    )


def _write(directory: Path, held: dict[str, torch.Tensor], number: int) -> dict[str, str]:
    file = f"model-{number:05d}.safetensors"
    save_file(held, directory / file, metadata={"format": "pt"})
    return dict.fromkeys(held, file)


def _embedding_bytes(config: Any, dtype: torch.dtype) -> int:
    return int(config.vocab_size * config.hidden_size * dtype.itemsize)
