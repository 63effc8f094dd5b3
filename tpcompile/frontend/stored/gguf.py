"""Weights of GGUF files, in the kinds that have formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.stored.layout import Layout, StoredWeight
from tpcompile.gguf.blocks import VALUES, first_half, q4_0_words, q8_0_integers
from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.codec import Blocks
from tpcompile.ir.format import Format, Kind

METHOD = "gguf"
_WEIGHT = "weight"


def _scales(kind: GgufKind) -> Blocks:
    return Blocks(_WEIGHT, kind.block.bytes, 1, first_half)


_LAYOUTS = {
    GgufKind.Q8_0: Layout(
        Kind.INT8,
        {"": Blocks(_WEIGHT, 34, 32, q8_0_integers), "_scale": _scales(GgufKind.Q8_0)},
    ),
    GgufKind.Q4_0: Layout(
        Kind.INT4,
        {
            Kind.INT4.suffix: Blocks(_WEIGHT, 18, 4, q4_0_words),
            "_scale": _scales(GgufKind.Q4_0),
        },
    ),
}
"""The kinds whose blocks have a scale and integers of one of our formats."""


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights that are not stored as values; embeddings are read as values."""
    found = {}
    modules = dict(module.named_modules())
    for name, word in scheme["kinds"].items():
        kind, owner = GgufKind[word], modules.get(name.rpartition(".")[0])
        if owner is None:  # the model has no such tensor, which is an error when it is read
            continue
        if isinstance(owner, nn.Linear) and kind in _LAYOUTS:
            layout = _LAYOUTS[kind]
            stored = Format.grouped(layout.kind, torch.float16, kind.block.columns)
            found[name] = StoredWeight(stored, layout)
        elif isinstance(owner, nn.Embedding) and kind in VALUES:
            values = Blocks(_WEIGHT, kind.block.bytes, kind.block.columns, VALUES[kind])
            found[name] = StoredWeight(None, Layout(Kind.F32, {"": values}))
        else:
            raise UnsupportedError(
                "tpcompile does not read weights of this kind",
                where=name,
                got=word,
                expected=", ".join(one.name for one in _LAYOUTS),
                hint="Use a file in Q8_0, F16 or BF16",
            )
    return found
