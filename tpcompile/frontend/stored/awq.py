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
    columns_of,
    hidden_linears,
    refuse,
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
_WHOLE_ROWS = -1


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
    size, left = scheme.get("group_size"), scheme.get("modules_to_not_convert") or []
    if not isinstance(left, list) or not all(isinstance(one, str) for one in left):
        refuse("modules_to_not_convert", left, "names of modules")
    found = {}
    for name, one in hidden_linears(module):
        if any(_is_part(name, each) for each in left):
            continue
        columns = 0 if size == _WHOLE_ROWS else columns_of(size, one.weight.shape[1])
        dtype = scales.get(f"{name}.scales", one.weight.dtype)
        stored = Format.grouped(Kind.INT4, dtype, columns, offsets=True)
        found[f"{name}.weight"] = StoredWeight(stored, _LAYOUT)
    return found


def _is_part(name: str, left: str) -> bool:
    """Return whether a module stays as it is: `left` is the start or the end of its name."""
    return name.startswith(left) or name.endswith(left)
