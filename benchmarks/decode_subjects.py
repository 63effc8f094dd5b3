"""What the sides of `python -m benchmarks decode` load: a random checkpoint, or a given model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.checkpoint import RandomCheckpoint, kept_checkpoint, random_checkpoint
from benchmarks.decode_measured import DTYPES, Weights
from tpcompile.frontend import capture, config_of
from tpcompile.gguf import open_gguf
from tpcompile.gguf.kinds import PLAIN
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops.embedding import EMBEDDINGS
from tpcompile.ir.ops.spec import local_bytes

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Subject:
    """A model that all sides load, and its sizes."""

    name: str
    """The dtype of a random checkpoint, or the name of a given model."""
    path: Path
    """The directory of a checkpoint, or a GGUF file."""
    layers: int
    vocabulary: int
    dtype: torch.dtype
    """The dtype of the values between products."""
    held: int
    """The bytes of all weights."""
    read: Weights
    preset: str = ""
    """The preset of a random checkpoint; empty for a given model."""
    linear: bool = False
    """Whether some layers have linear attention."""
    integers: str = ""
    """The integers to which peers round: "int8" for activations that meet a file's integers."""


def subjects(options: Namespace, progress: Console) -> Iterator[Subject]:
    """Yield the models of the options, or else the checkpoint in each dtype, while it exists."""
    for name, path in zip(names_of(options.files), options.files, strict=True):
        yield of_directory(name, path) if path.is_dir() else of_file(name, path)
    for dtype in [] if options.files else options.dtypes:
        progress.print(f"writing random weights of {options.model} in {dtype}")
        with _checkpoint(options, dtype) as checkpoint:
            yield of_checkpoint(dtype, options.model, checkpoint)


def names_of(files: Sequence[Path]) -> list[str]:
    """Return the names of files; whole paths if two of them have the same name."""
    names = [file.name for file in files]
    return names if len({*names}) == len(names) else [str(file) for file in files]


def of_file(name: str, path: Path) -> Subject:
    """Return a GGUF file as a subject."""
    config, tensors = config_of(str(path)), open_gguf(path).tensors
    read = [t for n, t in tensors.items() if n != _EMBEDDING or _HEAD not in tensors]
    plain = all(tensor.kind in PLAIN for tensor in tensors.values())
    held = sum(tensor.size for tensor in tensors.values())
    weights = Weights(sum(math.prod(t.shape) for t in read), sum(t.size for t in read))
    return _given(name, path, config, held, weights, integers="" if plain else "int8")


def of_directory(name: str, path: Path) -> Subject:
    """Return the checkpoint in a directory as a subject. Steps read the weights of its linears."""
    captured = capture(str(path))
    held = {
        node: local_bytes(value_type(node), 0)
        for node in captured.graph.graph.find_nodes(op="get_attr")
    }
    read = [node for node in held if any(user.target not in EMBEDDINGS for user in node.users)]
    count = sum(math.prod(value_type(node).local_shape(0)) for node in read)
    weights = Weights(count, sum(held[node] for node in read))
    return _given(name, path, captured.config, sum(held.values()), weights)


def _given(
    name: str, path: Path, config: Any, held: int, read: Weights, integers: str = ""
) -> Subject:
    """Return a given model with this configuration as a subject."""
    layers, vocabulary = config.num_hidden_layers, config.vocab_size
    return Subject(name, path, layers, vocabulary, config.dtype, held, read, integers=integers)


def of_checkpoint(dtype: str, preset: str, checkpoint: RandomCheckpoint) -> Subject:
    """Return the checkpoint of a preset as a subject."""
    count = checkpoint.weights_read
    return Subject(
        dtype,
        checkpoint.directory,
        checkpoint.layers,
        checkpoint.vocabulary,
        checkpoint.dtype,
        checkpoint.weight_bytes,
        Weights(count, count * checkpoint.dtype.itemsize),
        preset,
        "linear_attention" in (getattr(config_of(f"preset:{preset}"), "layer_types", None) or ()),
    )


@contextmanager
def _checkpoint(options: Namespace, dtype: str) -> Iterator[RandomCheckpoint]:
    """Provide the checkpoint, in the directory of the options or in a temporary one."""
    wide = getattr(torch, DTYPES[dtype])
    if options.directory is None:
        with random_checkpoint(options.model, dtype=wide) as checkpoint:
            yield checkpoint
    else:
        yield kept_checkpoint(options.directory / f"{options.model}-{dtype}", options.model, wide)
