"""Sources of checkpoint tensors: a model in memory, a seed, or files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from tpcompile.checkpoint_files import ADAPTER, INDEX, SINGLE
from tpcompile.errors import CheckpointError, UsageError
from tpcompile.gguf import is_gguf
from tpcompile.hub import is_cached, unreachable
from tpcompile.ir.codec import NO_ENCODINGS
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Format, Kind
from tpcompile.ir.layout import Interval
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.pieces import Read
from tpcompile.ir.recipe import Tensor, component_of, shape_of, tensors_of
from tpcompile.ir.stacked import is_stacked
from tpcompile.runtime.adapter import Adapter, Merging
from tpcompile.runtime.adapter_config import adapter_of
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.quantizing import Quantizing, ToQuantize

if TYPE_CHECKING:  # workers need no frontend, and start faster without it
    from tpcompile.frontend import Captured

GENERATION_CONFIG = "generation_config.json"

_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    GENERATION_CONFIG,
    ADAPTER,  # not applied: a checkpoint with an adapter is refused
)
"""The files downloaded for a hub id."""

_BIAS = 2
"""The position of the bias in the arguments of a linear."""


class ModelWeights:
    """The tensors of a model in memory, read in place."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"The model has no tensor {name}")
        return self._tensors[name][index]


@dataclass(frozen=True)
class _Kind:
    """The shape, dtype and distribution of a random tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    center: float
    spread: float
    most: int | None = None
    """The largest number. Without it, integers are words of random bits."""
    stacked: bool = False


class RandomWeights:
    """Random tensors that depend only on a seed and their name, so they are equal on every rank.

    Weights and biases have the spread of an untrained model; norm scales are near 1. No tensor is
    all zeros or all ones, so that a test detects a missing scale or bias.
    """

    def __init__(self, captured: Captured, seed: int) -> None:
        self._seed = seed
        self._kinds = _kinds(captured)
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if self._stacks(name):
            return self._experts(name, *index)
        if self._last is None or self._last[0] != name:
            self._last = (name, self.whole(name))
        tensor = self._last[1]
        if index == tuple(slice(0, extent) for extent in tensor.shape):
            self._last = None  # the caller's own, without a copy
            return tensor
        return tensor[index]

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor, which the caller owns."""
        if self._stacks(name):
            return self._experts(name, *(slice(0, extent) for extent in self._kinds[name].shape))
        return self._drawn(name, name, self._kinds[name].shape)

    def _stacks(self, name: str) -> bool:
        """Return whether a tensor is a stack of experts, each of which is drawn by itself."""
        if name not in self._kinds:
            raise CheckpointError(f"The model has no tensor {name}")
        return self._kinds[name].stacked

    def _experts(self, name: str, experts: slice, *index: slice) -> torch.Tensor:
        """Return a part of some experts of a stack. Threads share them; no others are drawn."""
        shape = self._kinds[name].shape[1:]
        widths = [span.stop - span.start for span in index]
        values = torch.empty(experts.stop - experts.start, *widths, dtype=self._kinds[name].dtype)

        inference = torch.is_inference_mode_enabled()  # threads do not inherit it

        def draw(part: torch.Tensor, expert: int) -> None:
            with torch.inference_mode(inference):
                part.copy_(self._drawn(name, f"{name}.{expert}", shape)[index])

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw, values, range(experts.start, experts.stop)))
        return values

    def _drawn(self, name: str, key: str, shape: Sequence[int]) -> torch.Tensor:
        """Return random numbers of the kind of a tensor, which depend on the seed and a key."""
        kind = self._kinds[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{key}".encode()))
        values = torch.empty(*shape, dtype=kind.dtype)
        flat = values.view(-1)
        for start, stop in _blocks(len(flat)):
            flat[start:stop] = _drawn(kind, stop - start, generator)
        return values

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to send to a rank, without the most recent tensor."""
        return {**vars(self), "_last": None}


_BLOCK = 1 << 20
"""The elements that are drawn at a time: their fp32 values may be larger than the tensor."""
_LEAST = 16
"""The elements that torch draws together: blocks of multiples of it equal one whole draw."""


def _blocks(size: int) -> Iterator[Interval]:
    """Yield blocks of a tensor; the last one is long enough to be drawn in the same way."""
    edges = [*range(0, size - _LEAST, _BLOCK), size] if size > _LEAST else [0, size]
    return pairwise(edges)


def _drawn(kind: _Kind, size: int, generator: torch.Generator) -> torch.Tensor:
    if kind.most is None and not kind.dtype.is_floating_point:
        return torch.randint(-(2**31), 2**31, (size,), generator=generator)
    values = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    scaled = values.mul_(kind.spread).add_(kind.center)
    if kind.most is None:
        return scaled
    rounded = scaled if kind.dtype.is_floating_point else scaled.round_()
    return rounded.clamp_(-kind.most, kind.most)


def _kinds(captured: Captured) -> Mapping[str, _Kind]:
    spread = getattr(captured.config, "initializer_range", 0.02)
    kinds: dict[str, _Kind] = {}
    for node in parameters(captured.graph.graph):
        parameter = parameter_of(node)
        scale = len(parameter.type.shape) == 1 and not _is_bias(node)
        for tensor in tensors_of(parameter.whole):
            if tensor.format is not None:
                kinds |= _kinds_of_components(tensor, tensor.format, spread)
                continue
            center, deviation = (1.0, 0.1) if scale else (0.0, spread)
            kinds[tensor.name] = _Kind(
                tensor.shape, parameter.type.dtype, center, deviation, stacked=is_stacked(tensor)
            )
    return kinds


def _kinds_of_components(tensor: Tensor, stored: Format, spread: float) -> dict[str, _Kind]:
    """Return the kinds of the components of a weight whose values have this spread."""
    most, units = _NUMBERS[stored.kind]
    stacked = is_stacked(tensor)
    kinds = {}
    for part in stored.components:
        component, dtype = component_of(tensor, part), part.dtype.torch
        if dtype.is_floating_point and part != stored.values:
            wide = 0.1 * spread / units
            kind = _Kind(shape_of(component), dtype, spread / units, wide, stacked=stacked)
        else:
            wide = units if part == stored.values else units / 4
            words = part.dtype == DType.I32
            kind = _Kind(shape_of(component), dtype, 0.0, wide, None if words else most, stacked)
        kinds[tensor.name + part.suffix] = kind
    return kinds


_NUMBERS = {
    Kind.FP8: (448, 100.0),
    Kind.INT8: (127, 40.0),
    Kind.INT6: (31, 18.0),
    Kind.INT5: (15, 9.0),
    Kind.INT4: (7, 4.6),
}
"""The largest random numbers of weights, and their spread in units of a scale."""


def _is_bias(node: fx.Node) -> bool:
    return any(
        user.target is LINEAR and len(user.args) > _BIAS and user.args[_BIAS] is node
        for user in node.users
    )


Weights = CheckpointFiles | Read
"""Files that must be opened first, or a source that can be read directly."""


@contextmanager
def opened(weights: Weights) -> Iterator[Read]:
    """Yield a source to read from; the files of a checkpoint are closed afterwards."""
    if not isinstance(weights, CheckpointFiles):
        yield weights
        return
    with ExitStack() as files:
        read: Read = files.enter_context(weights.open())
        if weights.adapter is not None:
            read = Merging(read, weights.adapter, files.enter_context(weights.adapter.open()))
        yield Quantizing(read, weights.quantized) if weights.quantized else read


def weights_of(
    captured: Captured, model: Any, seed: int | None, adapter: str | Path | None = None
) -> Weights:
    """Return the source of weights for `model`: a seed, its checkpoint, or the model in memory.

    The weights of a seed are random in the format that they have. Other weights may be changed: an
    `adapter` is merged into them, and then they may be quantized.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UsageError("random_weights must be an integer seed", got=repr(seed))
    if seed is not None and captured.model is not None:
        raise UsageError(
            "random_weights must only be given for a model without weights",
            got=f"{type(captured.model).__name__} in memory, which has weights",
        )
    if seed is not None and adapter is not None:
        raise UsageError(
            "An adapter changes the weights of a checkpoint, but random_weights makes others",
            got=f"adapter={str(adapter)!r} and random_weights={seed}",
            hint="Omit one of them",
        )
    if seed is not None:
        return RandomWeights(captured, seed)
    tensors, aliases = _before_quantization(captured)
    merged = None if adapter is None else adapter_for(captured, adapter)
    if isinstance(model, str | Path) and not str(model).startswith("preset:"):
        chosen = getattr(captured.config, "transformers_weights", None)
        quantized = _to_quantize(captured)
        encodings = NO_ENCODINGS if quantized else captured.encodings
        named = tensors, aliases, chosen, encodings, quantized, captured.ignored, merged
        return CheckpointFiles(directory_of(model), *named)
    if captured.model is None:
        raise CheckpointError(
            "The model has no weights to compile",
            got="a configuration",
            expected="a checkpoint, a PreTrainedModel, or random_weights=SEED",
        )
    if any(parameter.is_meta for parameter in captured.model.parameters()):
        raise CheckpointError(
            "The weights of the model must not be on the meta device",
            expected="a model with loaded weights",
        )
    read: Read = ModelWeights(captured.model)
    if merged is not None:
        read = Merging(read, merged, merged.open())
    quantized = _to_quantize(captured)
    return Quantizing(read, quantized) if quantized else read


def adapter_for(captured: Captured, directory: str | Path) -> Adapter:
    """Return the adapter of a directory; raise unless all of it can be merged into the model."""
    return adapter_of(directory, captured, *_before_quantization(captured))


def _to_quantize(captured: Captured) -> dict[str, ToQuantize]:
    return {
        name: ToQuantize(captured.tensors[name], source)
        for name, source in captured.quantized.items()
    }


def _before_quantization(captured: Captured) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the checkpoint, and the other names of tied ones."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in captured.tensors.items():
        source = captured.quantized.get(name)
        plain = tensor if source is None else replace(tensor, name=source, format=None)
        tensors.setdefault(plain.name, plain)
    untied = {name: source for name, source in captured.quantized.items() if name != source}
    return tensors, captured.aliases | untied


def directory_of(model: str | Path, more: Sequence[str] = ()) -> Path:
    """Return the directory of a checkpoint, or its GGUF file.

    The files of a hub id are downloaded, unless they are in the cache. `more` are patterns of
    further files.
    """
    if Path(model).is_dir() or is_gguf(model):
        return Path(model)
    model = str(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    offline = unreachable(model)
    if offline and not any(is_cached(model, name) for name in (SINGLE, INDEX)):
        raise CheckpointError(
            f"The cache of the hub holds no weights of {model}, and {offline}",
            hint="Pass the directory of the checkpoint, or random_weights=SEED",
        )
    try:
        cached_only = bool(offline)
        files = [*_FILES, *more]
        return Path(snapshot_download(model, allow_patterns=files, local_files_only=cached_only))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"The checkpoint {model} cannot be downloaded",
            got="the error: " + str(error).split("\n")[0],
            hint="Pass the directory of the checkpoint",
        ) from error
