"""Directories of compressed-tensors, in the layouts of `_LAYOUTS`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpcompile.checkpoint_files import names_of_module
from tpcompile.frontend.linears import class_names, model_linears
from tpcompile.frontend.stored.layout import (
    Layout,
    StoredWeight,
    Supported,
    block_of,
    check_pattern,
    columns_of,
    names_of_modules,
    refuse,
    require_all,
)
from tpcompile.ir.codec import Codec, Finite, Known, OfRows, OfWeight, Words
from tpcompile.ir.format import SCALE, ZERO_POINT, Format, Kind

log = logging.getLogger(__name__)


def _shape(weight: tuple[int, ...], _: int) -> dict[str, Known]:
    return {"weight_shape": Known(torch.tensor(weight, dtype=torch.int64), ("I64", "I32"))}


_LAYOUTS: Mapping[str, Mapping[int, Layout]] = {
    "int-quantized": {4: Layout(Kind.INT8), 8: Layout(Kind.INT8)},
    "float-quantized": {8: Layout(Kind.FP8, {"": Finite("weight")})},
    "pack-quantized": {
        4: Layout(Kind.INT4, {ZERO_POINT: Words("weight_zero_point", 4, 0)}, known=_shape),
        8: Layout(
            Kind.INT8,
            {
                "": Words("weight_packed", 8, 1),
                ZERO_POINT: Words("weight_zero_point", 8, 0),
            },
            known=_shape,
        ),
    },
}
"""The layouts by their names in the configuration and by bits."""
_MIXED = "mixed-precision"
"""The format of a scheme whose groups name their own."""
_REGEX = "re:"
_SCHEME: Supported = {
    "format": (*_LAYOUTS, _MIXED),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
"""The supported properties of a scheme."""
_GROUP: Supported = {"format": (None, *_LAYOUTS), "output_activations": (None,)}
"""The supported properties of a group of modules."""
_WEIGHTS: Supported = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group", "block"),
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


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights of a scheme of compressed-tensors."""
    require_all(_SCHEME, scheme)
    groups = _groups(scheme)
    if any(group.get("input_activations") is not None for group in groups.values()):
        log.warning(_WITH_ROUNDING if rounds else _WITHOUT_ROUNDING)
    ignored, targets = _Patterns(_patterns("ignore", scheme.get("ignore") or [])), _Patterns(groups)
    for name, part in module.named_modules():
        classes = class_names(type(part))
        embeds = isinstance(part, nn.Embedding) and ignored.chosen(name, classes) is None
        target = targets.chosen(name, classes) if embeds else None
        if target is not None:
            refuse("config_groups.targets", f"{target}, which names {name}", "linears only")
    stored: dict[str, StoredWeight] = {}
    for linear in model_linears(module):
        name, classes = linear.name, linear.classes
        target = targets.chosen(name, classes)
        if target is not None and ignored.chosen(name, classes) is None:
            dtype = scales.get(f"{name}.weight_scale", linear.dtype)
            stored[f"{name}.weight"] = _stored(scheme, groups[target], linear.shape[1], dtype)
    return stored


def _groups(scheme: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the group of each target; the last one if several groups have the same target."""
    groups = scheme.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    if not listed or not all(isinstance(group, dict) for group in listed):
        refuse("config_groups", groups, "groups with targets and weights")
    return {
        target: group
        for group in listed
        for target in _patterns("config_groups.targets", group.get("targets"))
    }


def _patterns(name: str, value: Any) -> list[str]:
    """Return names and regular expressions of modules."""
    patterns = names_of_modules(name, value)
    for pattern in patterns:
        if pattern.startswith(_REGEX):
            check_pattern(name, pattern.removeprefix(_REGEX), pattern)
    return patterns


class _Patterns:
    """Names of modules, regular expressions of them, and names of classes."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._plain = {pattern for pattern in patterns if not pattern.startswith(_REGEX)}
        regular = sorted(pattern for pattern in patterns if pattern.startswith(_REGEX))
        self._regular = {pattern: re.compile(pattern.removeprefix(_REGEX)) for pattern in regular}

    def chosen(self, name: str, classes: Sequence[str]) -> str | None:
        """Return the most specific one that names a module, matches its name or its class."""
        names = names_of_module(name)
        named = [alias for alias in names if alias in self._plain]
        named += [text for text, regular in self._regular.items() if any(map(regular.match, names))]
        return next(iter([*named, *sorted(self._plain.intersection(classes))]), None)


def _stored(
    scheme: Mapping[str, Any], group: Mapping[str, Any], whole: int, scales: torch.dtype
) -> StoredWeight:
    """Return how a weight is stored; `whole` is the number of its columns."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        refuse("config_groups.weights", weights, "an object")
    require_all(_GROUP, group, "config_groups.")
    require_all(_WEIGHTS, weights, "config_groups.weights.")
    name = group.get("format") or scheme["format"]
    if name == _MIXED:
        refuse("config_groups.format", None, f"one of {', '.join(_LAYOUTS)}, for each group")
    layouts, offsets = _LAYOUTS[name], not weights["symmetric"]
    layout = layouts.get(weights["num_bits"])
    if layout is None:
        bits = " or ".join(map(str, layouts))
        refuse("config_groups.weights.num_bits", weights["num_bits"], f"{bits} with {name}")
    wanted = "float" if layout.kind == Kind.FP8 else "int"
    if weights["type"] != wanted:
        refuse("config_groups.weights.type", weights["type"], f"{wanted!r} with {name}")
    columns, codecs = _groups_of(weights, whole)
    if offsets and (codecs or layout.kind == Kind.FP8):
        refuse("config_groups.weights.symmetric", False, "True, for floats, tensors and blocks")
    layout = replace(layout, codecs={**layout.codecs, **codecs})
    return StoredWeight(Format.grouped(layout.kind, scales, columns, offsets=offsets), layout)


def _groups_of(weights: Mapping[str, Any], whole: int) -> tuple[int, dict[str, Codec]]:
    """Return the columns per scale, and the codec of scales that several rows share."""
    match weights["strategy"]:
        case "group":
            return columns_of(weights.get("group_size"), whole), {}
        case "block":
            name = "config_groups.weights.block_structure"
            rows, columns = block_of(name, weights.get("block_structure"))
            return columns, {SCALE: OfRows("weight_scale", rows)}
        case "tensor":
            return 0, {SCALE: OfWeight("weight_scale", 1)}
    return 0, {}
