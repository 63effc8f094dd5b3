"""Checkpoints of GPTQ, of both versions of its format, with columns in order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from tpcompile.frontend.stored.layout import (
    Layout,
    StoredWeight,
    Supported,
    linears_in_groups,
    require_all,
)
from tpcompile.ir.codec import Codec, Known, Transposed, Words
from tpcompile.ir.format import SCALE, ZERO_POINT, Format, Kind

_SCHEME: Supported = {
    "bits": (4, 8),
    "sym": (True, False),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "pack_dtype": (None, "int32"),
    "lm_head": (None, False),
    "dynamic": (None, {}),
    "modules_in_block_to_quantize": (None,),
    "block_name_to_quantize": (None,),
}
"""The supported properties of a scheme. The tensors `g_idx` say whether columns are in order."""
_UNORDERED = (
    "The columns of groups must be in order, as without desc_act. Quantize the model again "
    "without it"
)
_ZEROS = 'With "sym": true, each zero must be the middle of the integers'


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights of a scheme of GPTQ."""
    require_all(_SCHEME, scheme)
    bits, symmetric = scheme["bits"], scheme["sym"]
    less = 0 if scheme.get("checkpoint_format") == "gptq_v2" else 1
    layout = _layout(bits, less, symmetric)
    weights = {}
    for name, columns, dtype in linears_in_groups(module, scheme.get("group_size"), scales):
        stored = Format.grouped(layout.kind, dtype, columns, offsets=not symmetric)
        weights[f"{name}.weight"] = StoredWeight(stored, layout)
    return weights


def _layout(bits: int, less: int, symmetric: bool) -> Layout:
    kind = Kind.INT4 if bits == 4 else Kind.INT8
    values: Codec = Words("qweight", bits, 1, transposed=True)
    if kind == Kind.INT4:  # the words are those of rows in memory
        values = Transposed("qweight")
    zeros = Words("qzeros", bits, 0, transposed=True, less=less)
    codecs = {kind.suffix: values, SCALE: Transposed("scales"), ZERO_POINT: zeros}

    def known(weight: tuple[int, ...], columns: int) -> dict[str, Known]:
        rows, width = weight
        group_columns = columns or width
        tensors = {
            "g_idx": Known(_groups(width, group_columns), ("I32", "I64"), hint=_UNORDERED),
            # Some tools write biases of zeros for linears that have none.
            "bias": Known(torch.zeros(()).expand(rows), ("F32", "F16", "BF16"), required=False),
        }
        if symmetric:
            middle = torch.zeros((), dtype=torch.int8).expand(rows, width // group_columns)
            tensors["qzeros"] = Known(zeros.encoded(middle), ("I32",), hint=_ZEROS)
        return tensors

    return Layout(kind, codecs, known)


@cache
def _groups(columns: int, group_columns: int) -> torch.Tensor:
    return torch.arange(columns, dtype=torch.int32) // group_columns
