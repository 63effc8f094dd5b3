"""The formats of a checkpoint's weights, from the `quantization_config` of its configuration.

Only directories of compressed-tensors with the format `int-quantized` are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Format
from tpcompile.json_files import shortened

log = logging.getLogger(__name__)

_REGEX = "re:"
_Supported = Mapping[str, tuple[Any, ...]]
_SCHEME: _Supported = {
    "quant_method": ("compressed-tensors",),
    "format": ("int-quantized",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
"""The supported properties of a scheme."""
_GROUP: _Supported = {"format": (None, "int-quantized"), "output_activations": (None,)}
"""The supported properties of a group of modules."""
_WEIGHTS: _Supported = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel", "group"),
    "dynamic": (False, None),
    "actorder": (None, False),
}
"""The supported properties of quantised weights."""


def formats_of(module: nn.Module, config: Any) -> dict[str, Format]:
    """Return the formats of the weights that are not stored as their values, by name."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return {}
    scheme = found if isinstance(found, dict) else found.to_dict()
    _require_all(_SCHEME, scheme)
    groups = _groups(scheme)
    if any(group.get("input_activations") is not None for group in groups):
        log.warning("the scheme of the checkpoint also rounds activations; tpcompile does not")
    ignored = scheme.get("ignore") or ()
    formats: dict[str, Format] = {}
    for name, linear in module.named_modules():
        if not isinstance(linear, nn.Linear) or _names(ignored, name, linear):
            continue
        group = next((g for g in groups if _names(g["targets"], name, linear)), None)
        if group is not None:
            formats[f"{name}.weight"] = _format(group, linear.weight)
    return formats


def _groups(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = scheme.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    if not found or not all(
        isinstance(one, dict) and isinstance(one.get("targets"), list) for one in found
    ):
        _refuse("config_groups", groups, "groups with targets and weights")
    return found


def _names(patterns: Iterable[str], name: str, module: nn.Module) -> bool:
    """Return whether one of the patterns names a module, its class, or matches its name."""
    return any(
        re.match(pattern.removeprefix(_REGEX), name)
        if pattern.startswith(_REGEX)
        else pattern in (name, type(module).__name__)
        for pattern in patterns
    )


def _format(group: Mapping[str, Any], weight: torch.Tensor) -> Format:
    """Return the format of a weight. Its scales have the dtype of the model."""
    given = group.get("weights") or {}
    _require_all(_GROUP, group, "config_groups.")
    _require_all(_WEIGHTS, given, "config_groups.weights.")
    columns = given.get("group_size") if given["strategy"] == "group" else 0
    if not isinstance(columns, int) or (columns and weight.shape[1] % columns):
        _refuse("group_size", columns, f"a number that divides {weight.shape[1]} columns")
    return Format.int8(weight.dtype, columns)


def _require_all(supported: _Supported, given: Mapping[str, Any], whose: str = "") -> None:
    for name, allowed in supported.items():
        if given.get(name) not in allowed:
            _refuse(whose + name, given.get(name), " or ".join(map(repr, allowed)))


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise UnsupportedError(
        "tpcompile cannot read weights that are quantized like this",
        where=f"quantization_config.{name}",
        got=shortened(repr(value)),
        expected=expected,
        hint="Use the original checkpoint, in bfloat16 or float32",
    )
