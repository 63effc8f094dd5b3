"""Mixtures of experts in a shell: Hugging Face's interface for experts calls an op."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import EXPERTS, LINEAR, arguments_of

aten = torch.ops.aten

IMPLEMENTATION = "tpcompile"
"""The name of our function in Hugging Face's interface for experts."""
SUPPORTED = "experts that are SwiGLU MLPs without biases"
_DECLARED = {
    "has_gate": (True, "experts without a gate"),
    "is_concatenated": (True, "experts with interleaved rows of gate and up"),
    "is_transposed": (False, "experts with transposed weights"),
    "has_bias": (False, "experts with biases"),
    "has_post_expert_norm": (False, "experts with a norm of their results"),
}
"""Declarations of a class of experts: the supported value, and the feature with another one."""
_CHOICE = [operator.getitem, aten.topk.default, aten.softmax.int]
"""The ops from the numbers of the chosen experts back to the logits."""
_OF_SCORES = {*_CHOICE, aten.sum.dim_IntList, aten.div_.Tensor, aten.to.dtype}


def register() -> None:
    """Register our function with Hugging Face."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def calls_interface(module: Any) -> bool:
    """Return whether a module computes experts by Hugging Face's interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_bias")


def _experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Implement the forward of a module of experts with `tpc.experts`."""
    out: torch.Tensor = torch.ops.tpc.experts(
        hidden_states, top_k_weights, top_k_index, module.gate_up_proj, module.down_proj
    )
    return out


def other_feature(module: Any) -> str | None:
    """Return how a module of experts differs from the op, or None."""
    for setting, (supported, feature) in _DECLARED.items():
        if getattr(module, setting, supported) != supported:
            return feature
    from transformers.activations import ACT2FN

    if type(module)._apply_gate.__module__ != "transformers.integrations.moe":
        return "experts with a gate of another form"
    activation = module.act_fn
    if activation is not functional.silu and type(activation) is not type(ACT2FN["silu"]):
        return f"experts that apply {getattr(activation, '__name__', type(activation).__name__)}"
    return None


def refuse_routers(graph: fx.Graph, model: str) -> None:
    """Refuse a router other than a softmax over all experts, of which the largest are chosen."""
    for node in graph.nodes:
        if node.target is not EXPERTS:
            continue
        bound = arguments_of(node)
        choice, scores = [[*_back_to_linear(bound[name])] for name in ("ids", "scores")]
        if choice != _CHOICE or not _OF_SCORES.issuperset(scores):
            raise UnsupportedError(
                f"{model} has a router of another form",
                where=str(origin_of(node)),
                expected="a softmax over all experts, of which the largest are chosen",
            )


def _back_to_linear(value: fx.Node) -> Iterator[object]:
    """Yield the ops from a result of a router back to its linear."""
    if value.target is LINEAR:
        return
    yield value.target
    for before in value.all_input_nodes:
        yield from _back_to_linear(before)
