"""The logits of routers in the results of a compiled mixture of experts, as Hugging Face's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.ops.experts import Routed
from tpcompile.runtime.kv.packing import Packed
from tpcompile.runtime.ranks.routing import RouterShape
from tpcompile.runtime.ranks.step import Routing

_OPTION = "output_router_logits"
_LOSS = "load_balancing_loss_func"
"""The function of Hugging Face's files that computes the loss of routers."""


def routing_of(
    wanted: bool | None, routers: Sequence[RouterShape], *, greedy: bool
) -> Routing | None:
    """Return the request for a step; raise if the model has no routers or returns no logits."""
    if not wanted:
        return None
    if not routers:
        raise UnsupportedError(
            f"A compiled model does not support the argument {_OPTION} without routers",
            expected="a mixture of experts",
        )
    if greedy:
        raise UsageError(f"{_OPTION} and greedy exclude each other", hint="Leave out one of them")
    return Routing()


def routed_output(
    logits: torch.Tensor, choices: Sequence[Routed], packed: Packed, config: Any, **more: Any
) -> MoeCausalLMOutputWithPast:
    """Return the results of Hugging Face's mixtures: also the logits of routers, and their loss.

    Router logits are `[batch * columns, experts]`. Those of padding are zero.
    """
    real = packed.real.flatten().to(logits.device)
    router_logits = []
    for choice in choices:
        whole = choice.logits.new_zeros((len(real), choice.logits.shape[-1]), device=logits.device)
        whole[real] = choice.logits.to(logits.device)
        router_logits.append(whole)
    every: Any = tuple(router_logits)  # Hugging Face declares a tuple of one tensor
    loss = _loss(every, real, config)
    return MoeCausalLMOutputWithPast(aux_loss=loss, logits=logits, router_logits=every, **more)


def _loss(
    router_logits: tuple[torch.Tensor, ...], real: torch.Tensor, config: Any
) -> torch.Tensor | None:
    """Return the loss of the tokens by Hugging Face's function, or None if the model has none."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    module = sys.modules[classes[type(config)].__module__]
    function = getattr(module, _LOSS, None)
    if function is None:
        return None
    mask = None if bool(real.all()) else real
    loss: torch.Tensor = function(
        router_logits, config.num_experts, config.num_experts_per_tok, mask
    )
    return loss
