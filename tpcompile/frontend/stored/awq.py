"""Checkpoints of AWQ, in the order of its matrix kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpcompile.frontend.stored.layout import (
    Layout,
    StoredWeight,
    Supported,
    linears_in_groups,
    names_of_modules,
    require_all,
)
from tpcompile.ir.codec import Transposed, Words, WordsOfRows
from tpcompile.ir.format import SCALE, ZERO_POINT, Format, Kind

_SCHEME: Supported = {
    "bits": (4,),
    "version": (None, "gemm", "GEMM"),
    "zero_point": (True,),
    "backend": (None, "autoawq", "llm-awq"),
}
"""The supported properties of a scheme."""
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The rows of a weight in a word, the one in its lowest bits first."""


def _words(name: str) -> Words:
    return Words(name, 4, 0, transposed=True, order=_ORDER)


_LAYOUT = Layout(
    Kind.INT4,
    {
        Kind.INT4.suffix: WordsOfRows("qweight", _words("qweight")),
        SCALE: Transposed("scales"),
        ZERO_POINT: _words("qzeros"),
    },
)


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights of a scheme of AWQ."""
    require_all(_SCHEME, scheme)
    left = names_of_modules("modules_to_not_convert", scheme.get("modules_to_not_convert") or [])
    weights = {}
    for name, columns, dtype in linears_in_groups(module, scheme.get("group_size"), scales, left):
        stored = Format.grouped(Kind.INT4, dtype, columns, offsets=True)
        weights[f"{name}.weight"] = StoredWeight(stored, _LAYOUT)
    return weights
