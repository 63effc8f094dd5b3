"""LoRA adapters, which are merged into weights while these are read.

A rank that reads a part of a weight also reads the same rows of B and the same columns of A, and
adds the scaled product of both. The values are those of peft's `merge_and_unload()` in the dtype of
the model: the product is exact to fp32, the sum is in fp32, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tpcompile.checkpoint_files import adapter_files
from tpcompile.ir.pieces import Read
from tpcompile.runtime.tensor_files import Index, SafetensorsFiles


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight: `scale` times B times A."""

    a: str
    """The name of A [rank, columns] in the adapter's file."""
    b: str
    """The name of B [rows, rank]."""
    rank: int
    scale: float
    dtype: torch.dtype
    """The dtype of the weight in the model, to which the sum is rounded."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that fits a model. Each rank opens its file to read its own slices."""

    directory: Path
    added: Mapping[str, LowRank]
    """What is added, by the names of the checkpoint's tensors."""

    def open(self) -> SafetensorsFiles:
        """Open the file; the caller closes it."""
        return SafetensorsFiles(adapter_files(self.directory))


class Merging:
    """A source of weights with an adapter merged into them."""

    def __init__(self, read: Read, adapter: Adapter, files: SafetensorsFiles) -> None:
        self._read, self._files = read, files
        self._added = adapter.added

    def __call__(self, name: str, index: Index) -> torch.Tensor:
        """Return a part of a tensor."""
        base, added = self._read(name, index), self._added.get(name)
        if added is None:
            return base
        rows, columns = index
        every = slice(0, added.rank)
        left = self._files.read(added.b, (rows, every)).double()
        right = self._files.read(added.a, (every, columns)).double()
        delta = (left @ right).float() * added.scale
        # base may be on another device than the file, and stored in another dtype than the model's
        values = base.to(added.dtype).float()
        return (values + delta.to(base.device)).to(added.dtype)
