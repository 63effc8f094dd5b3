"""The weights of a model that a LoRA adapter changes, and refusals of adapters that do not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpcompile.checkpoint_files import ADAPTER
from tpcompile.errors import CheckpointError, UnsupportedError, UsageError
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.recipe import Tensor, tensors_of
from tpcompile.json_files import JsonError, read_object, shortened
from tpcompile.runtime.adapter import Adapter, LowRank

if TYPE_CHECKING:  # workers need no frontend, and start faster without it
    from tpcompile.frontend import Captured

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

_NOT_MERGED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "transposed weights",
    "modules_to_save": "whole modules next to its matrices",
    "target_parameters": "parameters of experts",
    "trainable_token_indices": "rows of the embedding",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "weights that depend on the prompt (activated LoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "a router between adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""The settings that change an adapter's update, with their names in messages."""

_SAME_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""The initialisations that leave the weights of the base model as they are."""

_MERGE_FIRST = (
    "Merge it with peft: load the model and the adapter, call merge_and_unload(), "
    "save the result, and compile that"
)


@dataclass(frozen=True)
class _Config:
    """The settings of an adapter that scale its matrices."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    stabilised: bool
    base: str

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = self.alphas.get(_pattern_of(self.alphas, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.stabilised else alpha / rank


def adapter_of(
    directory: Any, captured: Captured, stored: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> Adapter:
    """Return the adapter of a directory. Raise unless all of it can be merged into the model.

    `stored` are the tensors of the model before any of them is quantized, and `aliases` the other
    names of tied ones. The names of the adapter's matrices say which of them it changes, as its
    `target_modules` did in training.
    """
    place = _directory(directory)
    config = _config(place)
    with Adapter(place, {}).open() as opened:
        shapes = opened.shapes
    dtypes = _dtypes(captured)
    added = {}
    for module, sides in _modules(place, shapes).items():
        tensor = _weight(module, captured, stored, aliases, config)
        rank = config.rank_of(module)
        for side, shape in (("A", (rank, tensor.shape[1])), ("B", (tensor.shape[0], rank))):
            if side not in sides:
                raise CheckpointError(
                    f"The adapter lacks lora_{side} of {module}",
                    where=str(place),
                    hint="The file may be damaged: save the adapter again",
                )
            if shapes[sides[side]] != shape:
                raise CheckpointError(
                    f"The shape of the adapter's lora_{side} of {module} does not fit the model",
                    where=str(place),
                    got=str(shapes[sides[side]]),
                    expected=str(shape),
                    hint=_other_base(config),
                )
        scale, dtype = config.scale_of(module), dtypes[tensor.name]
        added[tensor.name] = LowRank(sides["A"], sides["B"], rank, scale, dtype)
    return Adapter(place, added)


def _directory(directory: Any) -> Path:
    """Return the directory of an adapter, which has a configuration."""
    if not isinstance(directory, str | Path):
        raise UsageError(
            f"adapter must be the directory of an adapter, got {type(directory).__name__}"
        )
    if not (Path(directory) / ADAPTER).is_file():
        raise UsageError(
            f"adapter must be a directory with an {ADAPTER}, got {str(directory)!r}",
            hint="An adapter of the hub must be downloaded first: hf download NAME --local-dir DIR",
        )
    return Path(directory).absolute()


def _config(place: Path) -> _Config:
    """Read the settings of an adapter. Raise for those that cannot be merged."""
    try:
        read = read_object(place / ADAPTER)
    except (JsonError, OSError) as error:
        raise CheckpointError(
            "The configuration of the adapter cannot be read",
            where=str(place / ADAPTER),
            got=str(error),
        ) from error
    kind = read.get("peft_type")
    if kind != "LORA":
        raise _unsupported(place, f"The adapter must be a LoRA, got peft_type {kind!r}")
    for name, words in _NOT_MERGED.items():
        if read.get(name):
            raise _unsupported(place, f"An adapter with {words} ({name}) is not supported")
    if read.get("bias", "none") != "none":
        raise _unsupported(place, "An adapter that changes biases is not supported")
    start = read.get("init_lora_weights", True)
    if start not in _SAME_BASE:
        raise _unsupported(
            place, f"An adapter that changes its base model (init_lora_weights={start!r}) is not "
            "supported"
        )  # fmt: skip
    try:
        return _Config(
            _rank(read["r"]),
            float(read["lora_alpha"]),
            {key: _rank(rank) for key, rank in (read.get("rank_pattern") or {}).items()},
            {key: float(alpha) for key, alpha in (read.get("alpha_pattern") or {}).items()},
            bool(read.get("use_rslora")),
            str(read.get("base_model_name_or_path") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "The configuration of the adapter is not valid",
            where=str(place / ADAPTER),
            got=f"{type(error).__name__}: {shortened(str(error))}",
            expected="r, lora_alpha, rank_pattern and alpha_pattern as peft saves them",
        ) from error


def _rank(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"the rank {value!r}")
    return value


def _pattern_of(patterns: Iterable[str], module: str) -> str:
    """Return the first pattern that matches the end of a module's name, as peft does."""
    matching = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, "")


def _modules(place: Path, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of A and B of each module. Raise for any other tensor."""
    modules: dict[str, dict[str, str]] = {}
    for name in sorted(names):
        matched = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if matched is None:
            raise _unsupported(
                place,
                f"The tensor {shortened(name)} of the adapter cannot be merged",
                expected="only the matrices lora_A and lora_B of linears",
            )
        modules.setdefault(matched["module"], {})[matched["side"]] = name
    if not modules:
        raise CheckpointError("The adapter has no tensors", where=str(place))
    return modules


def _weight(
    module: str,
    captured: Captured,
    stored: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    config: _Config,
) -> Tensor:
    """Return the weight of a module that an adapter changes; raise if it cannot be merged."""
    name = f"{module}.weight"
    if name in aliases:
        tied = aliases[name].removesuffix(".weight")
        raise UnsupportedError(
            f"The adapter changes {module}, which is tied to {tied}: both would change",
            hint='Save the base model with "tie_word_embeddings": false and both tensors',
        )
    tensor = stored.get(name)
    experts, among, _ = module.partition(".experts")
    if among and tensor is None and any(key.startswith(f"{experts}.experts.") for key in stored):
        raise UnsupportedError(
            f"The adapter changes {module}: adapters of experts are not supported",
            hint=_MERGE_FIRST,
        )
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(
            f"The adapter changes {shortened(module)}, but the model has no such linear",
            hint=_other_base(config),
        )
    if tensor.format is not None:
        word = tensor.format.kind.word
        raise UnsupportedError(
            f"The adapter changes {module}, which the checkpoint stores in {word}",
            expected="weights of 16 bits or more",
            hint="Compile the original checkpoint with this adapter, and quantize the merged "
            f'weights while they are loaded, for example with weights="{word}"'
            if word in ("int8", "int4")
            else _MERGE_FIRST,
        )
    return tensor


def _dtypes(captured: Captured) -> dict[str, torch.dtype]:
    """Return the dtypes in which the model has its tensors, before any of them is quantized."""
    dtypes = {}
    for node in parameters(captured.graph.graph):
        parameter = parameter_of(node)
        for tensor in tensors_of(parameter.whole):
            name = captured.quantized.get(tensor.name, tensor.name)
            dtypes[name] = parameter.type.dtype
    return dtypes


def _other_base(config: _Config) -> str:
    base = f" It was trained on {shortened(config.base)}" if config.base else ""
    return f"The adapter may belong to another base model.{base}"


def _unsupported(place: Path, message: str, expected: str = "") -> UnsupportedError:
    return UnsupportedError(message, where=str(place), expected=expected, hint=_MERGE_FIRST)
