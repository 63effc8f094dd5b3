"""Checkpoints of 8-bit floating point, with a scale per block, or per weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from tpcompile.checkpoint_files import names_of_module
from tpcompile.frontend.linears import head_of, model_linears
from tpcompile.frontend.stored.layout import (
    Layout,
    StoredWeight,
    Supported,
    block_of,
    check_pattern,
    names_of_modules,
    require_all,
)
from tpcompile.ir.codec import Codec, Finite, OfRows, OfWeight
from tpcompile.ir.format import SCALE, Format, Kind

_SCHEME: Supported = {
    "activation_scheme": ("dynamic",),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float"),
    "modules_to_convert": (None, []),
}
"""The supported properties of a scheme. Inputs of linears are not rounded to 8 bits."""
_SCALES, _BLOCK, _LEFT = "weight_scale_inv", "weight_block_size", "modules_to_not_convert"


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights of a scheme of 8-bit floating point."""
    require_all(_SCHEME, scheme)
    columns = 0
    codec: Codec = OfWeight(_SCALES, 0)
    if scheme.get(_BLOCK) is not None:
        rows, columns = block_of(_BLOCK, scheme[_BLOCK])
        codec = OfRows(_SCALES, rows)
    layout = Layout(Kind.FP8, {"": Finite("weight"), SCALE: codec})
    weights = {}
    for name in _converted(module, scheme.get(_LEFT)):
        dtype = scales.get(f"{name}.{_SCALES}", torch.float32)
        weights[f"{name}.weight"] = StoredWeight(Format.grouped(Kind.FP8, dtype, columns), layout)
    return weights


def _converted(module: nn.Module, left: Any) -> list[str]:
    """Return the names of the quantized linears: all except those in `left`, by default the head.

    Experts are excluded by the name of the module with all experts of a layer, as in Hugging Face.
    """
    linears = {linear.name: linear for linear in model_linears(module)}
    if left is None:
        head = head_of(module)
        return [name for name in linears if name != head]
    # Imported here, because it loads packages that nothing else needs.
    from transformers.quantizers.quantizers_utils import should_convert_module

    for pattern in names_of_modules(_LEFT, left):
        check_pattern(_LEFT, pattern, pattern)

    @cache
    def converted(module: str) -> bool:
        return all(should_convert_module(alias, left) for alias in names_of_module(module))

    return [name for name, linear in linears.items() if converted(linear.module)]
