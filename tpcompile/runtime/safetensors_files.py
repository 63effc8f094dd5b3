"""Safetensors files written tensor by tensor, in any order, after their headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tpcompile.errors import UnsupportedError
from tpcompile.runtime.ranks.channel import tensor_bytes

_DTYPES = {
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""The format's dtype names. Files store later dtypes first, as safetensors itself does."""
_ALIGN = 8
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Place:
    """The file and the offset at which the bytes of a tensor start."""

    file: Path
    offset: int


class SafetensorsWriter:
    """A writer of checkpoint files that holds no tensor in memory."""

    def __init__(self, directory: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write the headers. `files` maps each file to its tensors, which may be meta tensors."""
        self._places: dict[str, _Place] = {}
        for file, tensors in files.items():
            self._begin(directory / file, tensors)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor at its offset."""
        place = self._places[name]
        with place.file.open("r+b") as file:
            file.seek(place.offset)
            file.write(tensor_bytes(tensor.contiguous()))

    def _begin(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        ranked = list(_DTYPES)
        for name, tensor in tensors.items():
            if tensor.dtype not in ranked:
                raise UnsupportedError(f"The tensor {name} cannot be saved as {tensor.dtype}")
        order = sorted(tensors, key=lambda name: (-ranked.index(tensors[name].dtype), name))
        header: dict[str, object] = {"__metadata__": _METADATA}
        ends: dict[str, int] = {}
        start = 0
        for name in order:
            tensor = tensors[name]
            ends[name] = start + tensor.nbytes
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, ends[name]],
            }
            start = ends[name]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGN)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        for name in order:
            offset = 8 + len(text) + ends[name] - tensors[name].nbytes
            self._places[name] = _Place(path, offset)
