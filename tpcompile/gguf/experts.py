"""Mixtures of experts in GGUF files, which stack the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpcompile.errors import CheckpointError
from tpcompile.gguf.file import GgufTensor
from tpcompile.gguf.metadata import FEATURES, Metadata

_EXPERTS, _CHOSEN = "expert_count", "expert_used_count"
_FEATURES = "expert_feed_forward_length"
_SHARED = "expert_shared_feed_forward_length"
WORDS = (_EXPERTS, _CHOSEN, _FEATURES)
"""The properties of experts that tokens choose."""
SHARED_WORDS = (*WORDS, _SHARED)
"""The properties of experts, also of a shared one."""
STACKS = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    "ffn_down_exps.weight": ("down_proj",),
}
"""The linears of an expert, by the names of the tensors that stack experts."""


def properties(metadata: Metadata) -> dict[str, Any]:
    """Return the properties of experts in the configuration of transformers.

    Older files leave out the width of experts, which is then that of an MLP, divided by the experts
    of a token.
    """
    chosen = metadata.count(_CHOSEN)
    return {
        "num_experts": metadata.count(_EXPERTS),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": metadata.count(_FEATURES, _width(metadata) // chosen),
    }


def with_shared(metadata: Metadata) -> dict[str, Any]:
    """Return the properties of experts, of which one is shared by all tokens.

    In older files it is as wide as an MLP.
    """
    shared = metadata.count(_SHARED, _width(metadata))
    return {**properties(metadata), "shared_expert_intermediate_size": shared}


def _width(metadata: Metadata) -> int:
    """Return the width of MLPs, or 0 if the file does not have it."""
    return metadata.count(FEATURES, 0, least=0)


def experts_of(local: str, name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the weights of the experts in a stack, one after another, with their names.

    `local` is the name of the stack without the block. The rows of several linears of an expert
    are one after another too.
    """
    linears = STACKS[local]
    if len(tensor.shape) != 3 or tensor.shape[1] % len(linears):
        raise CheckpointError(
            f"The tensor {name} must have the weights of several experts",
            where=str(tensor.path),
            got=f"the shape {list(tensor.shape)}",
            expected=f"3 dimensions, with the rows of {' and '.join(linears)}",
        )
    count, rows, columns = tensor.shape
    linear_bytes = tensor.size // (count * len(linears))
    for place in range(count * len(linears)):
        expert, side = divmod(place, len(linears))
        shape, start = (rows // len(linears), columns), tensor.start + place * linear_bytes
        yield f"{expert}.{linears[side]}.weight", replace(tensor, shape=shape, start=start)


def one_row(metadata: Metadata, name: str, tensor: GgufTensor) -> GgufTensor:
    """Return the gate of a shared expert as a row; llama.cpp also stores it as a vector."""
    if len(tensor.shape) != 1:
        return tensor
    return replace(tensor, shape=(1, *tensor.shape))
