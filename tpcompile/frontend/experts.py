"""Mixtures of experts in a shell: Hugging Face's interface for experts calls an op."""

from __future__ import annotations

from typing import Any

import torch

from tpcompile.errors import UnsupportedError

IMPLEMENTATION = "tpcompile"
"""The name of our function in Hugging Face's interface for experts."""
_DECLARED = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""What a class of experts says of itself, and what the op computes."""


def register() -> None:
    """Register our function with Hugging Face."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def calls_interface(module: Any) -> bool:
    """Return whether a module computes experts by Hugging Face's interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "gate_up_proj"))


def _experts(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Implement the forward of a module of experts with `tpc.experts`."""
    refuse_others(module)
    found: torch.Tensor = torch.ops.tpc.experts(
        hidden_states, top_k_weights, top_k_index, module.gate_up_proj, module.down_proj
    )
    return found


def refuse_others(module: Any) -> None:
    """Refuse experts that are not SwiGLU MLPs without biases."""
    name = type(module).__name__
    for setting, wanted in _DECLARED.items():
        given = getattr(module, setting, wanted)
        if given != wanted:
            raise UnsupportedError(
                f"{name} declares {setting}={given}", expected=f"{setting}={wanted}"
            )
    from transformers.activations import ACT2FN

    if type(module.act_fn) is not type(ACT2FN["silu"]):
        raise UnsupportedError(
            f"{name} applies {type(module.act_fn).__name__}", expected="experts that apply silu"
        )
