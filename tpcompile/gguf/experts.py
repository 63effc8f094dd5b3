"""Mixtures of experts in GGUF files, which stack the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpcompile.errors import CheckpointError
from tpcompile.gguf.file import GgufTensor
from tpcompile.gguf.metadata import Told

_EXPERTS, _CHOSEN = "expert_count", "expert_used_count"
_FEATURES = "expert_feed_forward_length"
WORDS = (_EXPERTS, _CHOSEN, _FEATURES)
"""The properties that are read here."""
STACKS = {
    "ffn_gate_exps.weight": "gate_proj",
    "ffn_up_exps.weight": "up_proj",
    "ffn_down_exps.weight": "down_proj",
}
"""The linears of experts, by the names of the tensors that stack them."""


def properties(told: Told) -> dict[str, Any]:
    """Return the properties of experts in the configuration of transformers."""
    return {
        "num_experts": told.count(_EXPERTS),
        "num_experts_per_tok": told.count(_CHOSEN),
        "moe_intermediate_size": told.count(_FEATURES),
    }


def experts_of(name: str, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Yield the weights of experts, one after another."""
    if len(tensor.shape) != 3:
        raise CheckpointError(
            f"The tensor {name} must have the weights of several experts",
            where=str(tensor.path),
            got=f"{len(tensor.shape)} dimensions",
            expected="3 dimensions",
        )
    each = tensor.size // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        yield replace(tensor, shape=tensor.shape[1:], start=tensor.start + expert * each)
