"""How a checkpoint stores weights, from the `quantization_config` of its configuration.

Only directories of compressed-tensors are read, in the layouts of `_LAYOUTS`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.codec import Codec, Encoded, Encodings, Words
from tpcompile.ir.format import MOST_COLUMNS, Format, Kind
from tpcompile.ir.recipe import Tensor
from tpcompile.json_files import shortened

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """How a checkpoint stores integers of some bits."""

    kind: Kind
    """The kind of the values in memory."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """The codecs of components that are stored otherwise than in memory, by suffix."""
    shape: bool = False
    """Whether a tensor `weight_shape` repeats the shape of the weight."""


_LAYOUTS: Mapping[str, Mapping[int, _Layout]] = {
    "int-quantized": {4: _Layout(Kind.INT8), 8: _Layout(Kind.INT8)},
    "pack-quantized": {
        4: _Layout(Kind.INT4, {"_zero_point": Words("weight_zero_point", 4, 0)}, shape=True),
        8: _Layout(
            Kind.INT8,
            {
                "": Words("weight_packed", 8, 1),
                "_zero_point": Words("weight_zero_point", 8, 0),
            },
            shape=True,
        ),
    },
}
"""The layouts by their names in the configuration and by bits."""
_MIXED = "mixed-precision"
"""The format of a scheme whose groups name their own."""
_REGEX = "re:"
_Supported = Mapping[str, tuple[Any, ...]]
_SCHEME: _Supported = {
    "quant_method": ("compressed-tensors",),
    "format": (*_LAYOUTS, _MIXED),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
"""The supported properties of a scheme."""
_GROUP: _Supported = {"format": (None, *_LAYOUTS), "output_activations": (None,)}
"""The supported properties of a group of modules."""
_WEIGHTS: _Supported = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("channel", "group"),
    "dynamic": (False, None),
    "actorder": (None, False, "weight", "static"),
}
"""The supported properties of quantised weights. Other orders need `weight_g_idx`."""


_WITHOUT_ROUNDING = (
    "the scheme of the checkpoint also rounds activations, which tpcompile does with "
    "activations='int8' only"
)
_WITH_ROUNDING = (
    "the scheme of the checkpoint also rounds activations; tpcompile rounds them to int8, with a "
    "scale per token and block of columns"
)


@dataclass(frozen=True)
class StoredWeight:
    """How the checkpoint stores a weight."""

    format: Format
    layout: _Layout


def stored_weights(
    module: nn.Module, config: Any, scales: Mapping[str, torch.dtype], rounds: bool = False
) -> dict[str, StoredWeight]:
    """Return the weights that are not stored as their values, by name.

    `scales` are the dtypes of scales in the checkpoint; others have the dtype of the model. With
    `rounds`, the weights are those of linears that round their inputs, and there must be some.
    """
    stored = _weights(module, config, scales, rounds)
    if not rounds:
        return stored
    if not stored:
        raise UsageError(
            "Only linears with weights in 8 or 4 bits round activations, and this model has none",
            got="activations='int8'",
            hint='Add weights="int8" or weights="int4", or omit activations',
        )
    return {name: replace(one, format=one.format.rounding()) for name, one in stored.items()}


def _weights(
    module: nn.Module, config: Any, scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    scheme = found.to_dict() if hasattr(found, "to_dict") else found
    if not isinstance(scheme, dict):
        _refuse("", scheme, "an object")
    _require_all(_SCHEME, scheme)
    groups = _groups(scheme)
    if any(group.get("input_activations") is not None for group in groups.values()):
        log.warning(_WITH_ROUNDING if rounds else _WITHOUT_ROUNDING)
    ignored = _patterns("ignore", scheme.get("ignore") or [])
    stored: dict[str, StoredWeight] = {}
    for name, one in module.named_modules():
        if not isinstance(one, nn.Linear | nn.Embedding) or _chosen(ignored, name, one):
            continue
        target = _chosen(list(groups), name, one)
        if target is not None and not isinstance(one, nn.Linear):
            _refuse("config_groups.targets", f"{target}, which names {name}", "linears only")
        if target is not None:
            dtype = scales.get(f"{name}.weight_scale", one.weight.dtype)
            stored[f"{name}.weight"] = _stored(scheme, groups[target], one.weight.shape[1], dtype)
    return stored


def encodings_of(tensors: Iterable[Tensor], stored: Mapping[str, StoredWeight]) -> Encodings:
    """Return what the checkpoint stores otherwise than memory, of these weights."""
    components, shapes = {}, {}
    for tensor in tensors:
        if tensor.format is None:
            continue
        layout, module = stored[tensor.name].layout, tensor.name.rpartition(".")[0]
        for suffix, codec in layout.codecs.items():
            components[tensor.name + suffix] = Encoded(f"{module}.{codec.name}", codec)
        if layout.shape:
            shapes[f"{tensor.name}_shape"] = tensor.shape
    return Encodings(components, shapes)


def _groups(scheme: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the group of each target; the last one if several groups have the same target."""
    groups = scheme.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    if not found or not all(isinstance(one, dict) for one in found):
        _refuse("config_groups", groups, "groups with targets and weights")
    return {
        target: one
        for one in found
        for target in _patterns("config_groups.targets", one.get("targets"))
    }


def _patterns(name: str, value: Any) -> list[str]:
    """Return names and regular expressions of modules."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        _refuse(name, value, "names of modules")
    for one in value:
        if not one.startswith(_REGEX):
            continue
        try:
            re.compile(one.removeprefix(_REGEX))
        except re.error as error:
            _refuse(name, one, f"a regular expression ({error})")
    return value


def _chosen(patterns: Sequence[str], name: str, module: nn.Module) -> str | None:
    """Return the most specific of the patterns that name a module, match its name or its class."""
    ordered = sorted(patterns, key=lambda one: (one.startswith(_REGEX), one))
    classes = [kind.__name__ for kind in type(module).__mro__]
    named = (
        one
        for one in ordered
        if one == name or (one.startswith(_REGEX) and re.match(one.removeprefix(_REGEX), name))
    )
    return next(named, None) or next((one for one in ordered if one in classes), None)


def _stored(
    scheme: Mapping[str, Any], group: Mapping[str, Any], whole: int, scales: torch.dtype
) -> StoredWeight:
    """Return how a weight with so many columns is stored."""
    given = group.get("weights")
    if not isinstance(given, dict):
        _refuse("config_groups.weights", given, "an object")
    _require_all(_GROUP, group, "config_groups.")
    _require_all(_WEIGHTS, given, "config_groups.weights.")
    name = group.get("format") or scheme["format"]
    if name == _MIXED:
        _refuse("config_groups.format", None, f"one of {', '.join(_LAYOUTS)}, for each group")
    layout = _LAYOUTS[name][given["num_bits"]]
    columns: Any = given.get("group_size") if given["strategy"] == "group" else 0
    if given["strategy"] == "group" and not _divides(columns, whole):
        _refuse("group_size", columns, f"a number that divides {whole} columns")
    offsets = not given["symmetric"]
    return StoredWeight(Format.grouped(layout.kind, scales, columns, offsets=offsets), layout)


def _divides(columns: Any, whole: int) -> bool:
    return type(columns) is int and 0 < columns <= MOST_COLUMNS and whole % columns == 0


def _require_all(supported: _Supported, given: Mapping[str, Any], whose: str = "") -> None:
    for name, allowed in supported.items():
        if given.get(name) not in allowed:
            _refuse(whose + name, given.get(name), " or ".join(map(repr, allowed)))


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise UnsupportedError(
        "tpcompile cannot read weights that are quantized like this",
        where=f"quantization_config.{name}".rstrip("."),
        got=shortened(repr(value)),
        expected=expected,
        hint="Use the original checkpoint, in bfloat16 or float32",
    )
