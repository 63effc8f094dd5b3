"""Weights of GGUF files, in the kinds that have formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.linears import model_linears
from tpcompile.frontend.stored.layout import Layout, StoredWeight, refuse
from tpcompile.gguf.blocks import CONTENTS
from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.codec import Blocks

METHOD = "gguf"
_WEIGHT = "weight"


def weights_of(
    module: nn.Module, scheme: Mapping[str, Any], scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    """Return the weights that are not stored as values."""
    weights = {}
    linears = {f"{linear.name}.weight" for linear in model_linears(module)}
    modules = dict(module.named_modules())
    for name, kind in _kinds_of(scheme).items():
        owner = modules.get(name.rpartition(".")[0])
        if owner is None and name not in linears:
            continue  # the model has no such tensor, which is an error when it is read
        if kind not in CONTENTS or not (name in linears or isinstance(owner, nn.Embedding)):
            raise UnsupportedError(
                "tpcompile does not read weights of this kind",
                where=name,
                got=kind.name,
                expected=", ".join(known.name for known in CONTENTS)
                + ", for linears and embeddings",
                hint="Use a file in another quantization, such as Q8_0 or Q4_K_M",
            )
        weights[name] = _stored(kind)
    return weights


def _kinds_of(scheme: Mapping[str, Any]) -> dict[str, GgufKind]:
    kinds = scheme.get("kinds")
    if not isinstance(kinds, dict) or not {*map(str, kinds.values())} <= {*GgufKind.__members__}:
        refuse("kinds", kinds, "the kinds of weights, as a GGUF file has them")
    return {name: GgufKind[str(word)] for name, word in kinds.items()}


def _stored(kind: GgufKind) -> StoredWeight:
    contents, block = CONTENTS[kind], kind.block
    codecs = {
        part.suffix: Blocks(
            _WEIGHT, block.bytes, block.columns // part.columns, contents.parts[part.suffix]
        )
        for part in contents.format.components
    }
    return StoredWeight(contents.format, Layout(contents.format.kind, codecs))
