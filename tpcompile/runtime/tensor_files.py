"""Tensors in files, of which parts are read: safetensors, and GGUF with names of transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpcompile.checkpoint_files import changed, size_of, text_names, unreadable
from tpcompile.closing import Closing
from tpcompile.errors import CheckpointError
from tpcompile.gguf import GgufTensor, open_gguf
from tpcompile.gguf.conversions import Heads, Order, Transform
from tpcompile.gguf.kinds import PLAIN
from tpcompile.gguf.models import tensors_of

Index = tuple[slice, ...]


class TensorFiles(Closing):
    """Open files with tensors. Only their headers have been read."""

    paths: Mapping[str, Path]
    """The file of each tensor."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each tensor."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, by the names of safetensors."""

    @abstractmethod
    def read(self, name: str, index: Index) -> torch.Tensor:
        """Read a part of a tensor. Raise if its file has changed since it was opened."""


class SafetensorsFiles(TensorFiles):
    """Safetensors files, given the file of each tensor."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._open = ExitStack()
        self._files: dict[Path, Any] = {}
        self._sizes: dict[Path, int] = {}
        self._names = text_names(files)
        self.paths = {name: files[stored] for name, stored in self._names.items()}
        try:
            self.shapes = {name: tuple(self._tensor(name).get_shape()) for name in self.paths}
        except BaseException:
            self.close()
            raise

    def dtype(self, name: str) -> str:
        return str(self._tensor(name).get_dtype())

    def read(self, name: str, index: Index) -> torch.Tensor:
        path = self.paths[name]
        if size_of(path) != self._sizes[path]:
            raise changed(path, self._sizes[path])
        try:
            part: torch.Tensor = self._tensor(name)[index]
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
        return part

    def close(self) -> None:
        self._open.close()
        self._files.clear()

    def _tensor(self, name: str) -> Any:
        path = self.paths[name]
        if path not in self._files:
            try:
                opened = safe_open(path, framework="pt")
                self._files[path] = self._open.enter_context(opened)
                self._sizes[path] = path.stat().st_size
            except (SafetensorError, OSError) as error:
                raise unreadable(path, error) from error
        return self._files[path].get_slice(self._names[name])


class GgufFiles(TensorFiles):
    """The GGUF files of a model. Tensors of blocks are rows of bytes."""

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        self._tensors = tensors_of(file)
        self.paths = {name: tensor.path for name, tensor in self._tensors.items()}
        self.shapes = {name: _stored_shape(tensor) for name, tensor in self._tensors.items()}
        self._sizes = file.sizes
        self._mapped: dict[Path, torch.Tensor] = {}

    def dtype(self, name: str) -> str:
        kind = self._tensors[name].kind
        return kind.name if kind in PLAIN else "U8"

    def read(self, name: str, index: Index) -> torch.Tensor:
        tensor = self._tensors[name]
        stored = [self._stored(part) for part in tensor.parts or (tensor,)]
        values = stored[0][index] if tensor.order is None else _ordered(stored, index, tensor.order)
        transform = tensor.transform
        return values if transform is None else _transformed(name, tensor.path, values, transform)

    def _stored(self, tensor: GgufTensor) -> torch.Tensor:
        path, size = tensor.path, self._sizes[tensor.path]
        if size_of(path) != size:
            raise changed(path, size)
        if path not in self._mapped:
            self._mapped[path] = torch.from_file(str(path), size=size, dtype=torch.uint8)
        whole = self._mapped[path][tensor.start : tensor.start + tensor.size]
        return whole.view(PLAIN.get(tensor.kind, torch.uint8)).view(_stored_shape(tensor))

    def close(self) -> None:
        self._mapped.clear()


def _stored_shape(tensor: GgufTensor) -> tuple[int, ...]:
    return tensor.shape if tensor.kind in PLAIN else (*tensor.shape[:-1], tensor.row_bytes)


def _ordered(parts: Sequence[torch.Tensor], index: Index, order: Order | Heads) -> torch.Tensor:
    """Return a part of a tensor whose elements along an axis are stored in another order.

    Along this axis, `parts` are one after another.
    """
    axis = order.axis % parts[0].dim()
    extents = [part.shape[axis] for part in parts]
    places = order.places(sum(extents))[index[axis]]
    other_axes = (*index[:axis], slice(None), *index[axis + 1 :])
    if len(parts) == 1:
        return parts[0][other_axes].index_select(axis, places)
    pieces, first = [], 0
    where = torch.bucketize(places, torch.tensor(extents).cumsum(0), right=True)
    for number, part in enumerate(parts):
        pieces.append(part[other_axes].index_select(axis, places[where == number] - first))
        first += extents[number]
    return torch.cat(pieces, axis).index_select(axis, where.argsort(stable=True).argsort())


def _transformed(name: str, path: Path, stored: torch.Tensor, rule: Transform) -> torch.Tensor:
    """Return the values that are made from the stored ones."""
    values = rule.function(stored)
    wrong = stored[~values.isfinite()]
    if len(wrong):
        raise CheckpointError(
            f"The tensor {name} is not valid",
            where=str(path),
            got=str(wrong[0].item()),
            expected=rule.expected,
            hint="The file may be damaged: download it again",
        )
    return values
