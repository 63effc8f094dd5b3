"""Checkpoints on disk: files from which a rank reads only the slices it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch

from tpcompile.checkpoint_files import INDEX as INDEX
from tpcompile.checkpoint_files import files_of
from tpcompile.closing import Closing
from tpcompile.errors import CheckpointError
from tpcompile.gguf import is_gguf
from tpcompile.ir.codec import NO_ENCODINGS, Codec, Encodings, Known
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Component
from tpcompile.ir.recipe import Tensor, stored_tensors
from tpcompile.ir.stacked import StackedPart, parts_of, stored_name
from tpcompile.runtime.adapter import Adapter
from tpcompile.runtime.quantizing import ToQuantize
from tpcompile.runtime.tensor_files import GgufFiles, SafetensorsFiles

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused tensors that some tools write, and the tensors whose rows they concatenate, in order."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of stored tensors. Integers and float8 need scales to become weights: a bare
cast would give wrong weights without an error."""

_EXACT = {
    DType.F32: ("F32", "BF16", "F16"),
    DType.BF16: ("BF16",),
    DType.F16: ("F16",),
}
"""The dtypes of stored scales that a dtype in memory holds exactly."""

_NAMES = {torch.uint8: "U8", **{dtype.torch: dtype.name for dtype in DType}}
"""The names of dtypes in safetensors files."""

_ORDER = "g_idx"
_ORDERED = (
    "It gives the order of the columns of a quantized weight, which is not supported: quantize "
    "the model without act-order"
)

DERIVED = ("rotary_emb.inv_freq",)
"""Name suffixes of tensors that old checkpoints store and models compute themselves."""


@dataclass(frozen=True)
class _Stored:
    """The location of a model's tensor: a stored tensor, the first row in it, and its codec."""

    name: str
    row: int = 0
    codec: Codec | None = None

    @property
    def names(self) -> Iterator[str]:
        """The tensors that are read."""
        yield self.name


@dataclass(frozen=True)
class _Stacked:
    """The locations of a model's tensor that is stored in parts, by expert."""

    parts: Sequence[Sequence[StackedPart]]
    codec: Codec | None = None

    @property
    def names(self) -> Iterator[str]:
        """The tensors that are read."""
        return (part.name for parts in self.parts for part in parts)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint that each rank opens itself to read its own slices."""

    directory: Path
    """The directory of a checkpoint, or a GGUF file."""
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    chosen: Any = None
    """`transformers_weights` of the configuration: the file to read, or its index."""
    encodings: Encodings = NO_ENCODINGS
    quantized: Mapping[str, ToQuantize] = field(default_factory=dict)
    """The weights that are quantized while they are read, by name."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of the names of stored tensors that the model does not need."""
    adapter: Adapter | None = None
    """The adapter that is merged into weights while they are read, before they are quantized."""

    def open(self) -> Checkpoint:
        """Open the files; the caller closes them."""
        return Checkpoint(
            self.directory, self.tensors, self.aliases, self.chosen, self.encodings, self.ignored
        )


class Checkpoint(Closing):
    """A directory of safetensors files, or a GGUF file, as a source of the tensors of a model.

    Opening it reads only the files' headers. A tied head may be absent. Fused QKV and gate-up
    tensors are split. Experts may be stored one by one.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        chosen: Any = None,
        encodings: Encodings = NO_ENCODINGS,
        ignored: Sequence[str] = (),
    ) -> None:
        self._directory, self._encodings, self._ignored = directory, encodings, ignored
        self._files = (
            GgufFiles(directory)
            if is_gguf(directory)
            else SafetensorsFiles(files_of(directory, chosen))
        )
        self._paths, self._shapes = self._files.paths, self._files.shapes
        self._twins: dict[str, list[_Stored]] = {}
        try:
            stored = list(stored_tensors(tensors.values()))
            self._parts = {tensor.name: part for tensor, part in stored}
            self._stored = self._resolve({tensor.name: tensor for tensor, _ in stored}, aliases)
            for name, known in encodings.known.items():
                self._check_known(name, known)
        except BaseException:
            self.close()
            raise

    def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Read only this part of a tensor of the model."""
        if name not in self._stored:
            raise CheckpointError(f"The model has no tensor {name}")
        part = self._read(self._stored[name], index)
        for twin in self._twins[name]:
            if not torch.equal(self._read(twin, index).double(), part.double()):
                raise self._untied(name, twin)
        return part

    def _read(self, stored: _Stored | _Stacked, index: tuple[slice, ...]) -> torch.Tensor:
        if isinstance(stored, _Stacked):
            return self._read_stacked(stored, index)
        if stored.codec is not None:
            read = self._files.read(stored.name, stored.codec.box(index))
            return stored.codec.decoded(read, index)
        if stored.row:
            rows = index[0]
            index = (slice(rows.start + stored.row, rows.stop + stored.row), *index[1:])
        return self._files.read(stored.name, index)

    def _read_stacked(self, stored: _Stacked, index: tuple[slice, ...]) -> torch.Tensor:
        experts, rows, columns = index
        part: torch.Tensor | None = None
        for name, expert, (first, last) in chain(*stored.parts[experts]):
            low, high = max(first, rows.start), min(last, rows.stop)
            if low < high:
                inside = (slice(low - first, high - first), columns)
                read = self._read(_Stored(name, codec=stored.codec), inside)
                if part is None:
                    extents = (experts.stop - experts.start, rows.stop - rows.start)
                    part = read.new_empty((*extents, read.shape[1]))
                part[expert - experts.start, low - rows.start : high - rows.start] = read
        if part is None:
            nothing = _Stored(stored.parts[0][0].name, codec=stored.codec)
            return self._read(nothing, (slice(0, 0), slice(0, 0)))[None]
        return part

    def close(self) -> None:
        self._files.close()

    def _resolve(
        self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
    ) -> dict[str, _Stored | _Stacked]:
        """Locate each tensor of the model; raise for a missing or an unexpected tensor."""
        locations: dict[str, _Stored | _Stacked] = {}
        for name, tensor in tensors.items():
            component, codec = self._parts[name], self._encodings.components.get(name)
            self._twins[name] = []
            stacked = self._stacked(tensor, component, codec)
            if stacked is not None:
                locations[name] = stacked
                continue
            if codec is not None:
                tensor_name = stored_name(name, codec.name)
                self._check(tensor_name, tensor.shape, component, codec)
                locations[name] = _Stored(tensor_name, codec=codec)
                continue
            names = (name, *(alias for alias, known in aliases.items() if known == name))
            stored = [_Stored(key) for key in names if key in self._shapes]
            part = self._part_of_fused(tensor, tensors) if not stored else None
            stored += [part] if part is not None else []
            if not stored:
                raise self._missing(name, names)
            for location in stored:
                self._check_dtype(location.name, self._parts[name])
                self._check_shape(tensor, location, tensors)
            locations[name], *self._twins[name] = stored
        used = {read for stored in locations.values() for read in stored.names}
        self._refuse_extra(used | self._encodings.known.keys(), aliases)
        return locations

    def _stacked(
        self, tensor: Tensor, component: Component | None, codec: Codec | None
    ) -> _Stacked | None:
        """Return the locations of a tensor whose parts are stored expert by expert."""
        parts = parts_of(tensor, component, codec.name if codec else None)
        if not parts or (tensor.name in self._shapes and codec is None):
            return None
        dtypes: dict[str, str] = {}
        for name, _, (first, last) in parts:
            self._check(name, (last - first, tensor.shape[2]), component, codec)
            dtypes.setdefault(self._files.dtype(name), name)
        if len(dtypes) > 1:
            first_name, other, *_ = dtypes.values()
            raise CheckpointError(
                f"The tensors {first_name} and {other} must have the same dtype",
                where=str(self._paths[other]),
                got=" and ".join(dtypes),
                expected="one dtype for all experts of a layer",
                hint="The files may be of different checkpoints: download them again",
            )
        experts = sorted(parts, key=lambda part: part.expert)
        return _Stacked(
            [[*group] for _, group in groupby(experts, lambda part: part.expert)], codec
        )

    def _check(
        self, name: str, shape: tuple[int, ...], part: Component | None, codec: Codec | None
    ) -> None:
        """Refuse a tensor that does not store a component of this shape."""
        if name not in self._shapes:
            raise self._missing(name, (name,))
        if codec is None:
            self._check_dtype(name, part)
            self._require_shape(name, shape)
            return
        dtype = codec.dtype(torch.float32 if part is None else part.dtype.torch)
        self._require_dtype(name, _NAMES[dtype])
        self._require_shape(name, codec.shape(shape))

    def _check_known(self, name: str, known: Known) -> None:
        """Refuse a tensor that contradicts the configuration."""
        if name not in self._shapes:
            if known.required:
                raise self._missing(name, (name,))
            return
        self._require_dtype(name, *known.dtypes)
        self._require_shape(name, tuple(known.value.shape))
        stored = self._files.read(name, tuple(slice(0, extent) for extent in known.value.shape))
        differs = (stored != known.value).nonzero().tolist()
        if differs:
            first = tuple(differs[0])
            raise CheckpointError(
                f"The tensor {name} does not match the configuration",
                where=str(self._paths[name]),
                got=f"{stored[first].item()} at {list(first)}",
                expected=str(known.value[first].item()),
                hint=known.hint,
            )

    def _part_of_fused(self, tensor: Tensor, tensors: Mapping[str, Tensor]) -> _Stored | None:
        for fused, parts in FUSED.items():
            for part in parts:
                whole = tensor.name.replace(f".{part}.", f".{fused}.")
                alike = (tensor.name.replace(f".{part}.", f".{other}.") for other in parts)
                if (
                    whole != tensor.name
                    and whole in self._shapes
                    and all(name in tensors for name in alike)
                ):
                    return _Stored(whole, _rows_before(tensor.name, part, parts, tensors))
        return None

    def _check_dtype(self, name: str, part: Component | None) -> None:
        if part is not None and not part.dtype.torch.is_floating_point:
            self._require_dtype(name, part.dtype.name)
            return
        dtype = self._files.dtype(name)
        if dtype not in FLOATS:
            raise CheckpointError(
                f"The tensor {name} must have a floating-point dtype of 16 bits or more",
                where=str(self._paths[name]),
                got=dtype,
                expected=", ".join(FLOATS),
                hint="The checkpoint may be quantized: download the original one",
            )
        if part is not None and dtype not in _EXACT[part.dtype]:
            raise CheckpointError(
                f"The scales {name} must not be rounded",
                where=str(self._paths[name]),
                got=dtype,
                expected=" or ".join(_EXACT[part.dtype]),
                hint="Compile the model again: its files were not here when it was captured",
            )

    def _require_dtype(self, name: str, *expected: str) -> None:
        dtype = self._files.dtype(name)
        if dtype not in expected:
            raise CheckpointError(
                f"The tensor {name} must have the dtype that the configuration says",
                where=str(self._paths[name]),
                got=dtype,
                expected=" or ".join(expected),
                hint="The config.json and the files must be of the same checkpoint",
            )

    def _check_shape(self, tensor: Tensor, stored: _Stored, tensors: Mapping[str, Tensor]) -> None:
        expected = tensor.shape
        if _module_of(stored.name) in FUSED:
            rows = _fused_rows(stored.name, tensors)
            expected = (rows, *tensor.shape[1:])
        self._require_shape(stored.name, expected)

    def _require_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if self._shapes[name] != expected:
            raise CheckpointError(
                f"The shape of the tensor {name} does not match the configuration",
                where=str(self._paths[name]),
                got=str(self._shapes[name]),
                expected=str(expected),
                hint="The config.json and the files must be of the same checkpoint",
            )

    def _untied(self, name: str, twin: _Stored) -> CheckpointError:
        """Return the error for tied tensors that differ; Hugging Face does not tie them either."""
        return CheckpointError(
            f"The tensors {name} and {twin.name} are tied, but are stored with different values",
            where=str(self._paths[twin.name]),
            expected="equal values, or only one of the two",
            hint='If they must not be tied, set "tie_word_embeddings": false in the config.json',
        )

    def _missing(self, name: str, names: tuple[str, ...]) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint lacks the tensor {' or '.join(names)}",
            where=str(self._directory),
            got=f"{len(self._shapes)} other tensors",
            expected="every tensor of the model",
            hint="A file may be missing, or the checkpoint may belong to another model",
        )

    def _refuse_extra(self, used: set[str], aliases: Mapping[str, str]) -> None:
        extra = [
            name
            for name in self._shapes
            if name not in used and name not in aliases and not name.endswith(DERIVED)
            if not any(re.search(pattern, name) for pattern in self._ignored)
        ]
        if extra:
            raise CheckpointError(
                f"The checkpoint holds tensors that the model does not have: {extra[0]}"
                + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""),
                where=str(self._paths[extra[0]]),
                expected="only the tensors of the model",
                hint=_ORDERED
                if extra[0].endswith(_ORDER)
                else "The config.json may belong to another model: check the number of layers, "
                "biases and adapters",
            )


def _rows_before(
    name: str, part: str, parts: tuple[str, ...], tensors: Mapping[str, Tensor]
) -> int:
    before = parts[: parts.index(part)]
    return sum(tensors[name.replace(f".{part}.", f".{earlier}.")].shape[0] for earlier in before)


def _fused_rows(name: str, tensors: Mapping[str, Tensor]) -> int:
    fused = _module_of(name)
    return sum(tensors[name.replace(f".{fused}.", f".{part}.")].shape[0] for part in FUSED[fused])


def _module_of(name: str) -> str:
    """Return the name of the module whose weight or bias the tensor is."""
    return name.rpartition(".")[0].rpartition(".")[2]
