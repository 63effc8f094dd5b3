"""Mixtures with many ties, and mistakes in their routers and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tests.mixtures import HYBRIDS, lively_mixture, random_mixture
from tpcompile.ir.meta import operand, parameter_of, set_parameter
from tpcompile.ir.ops import EXPERTS, TOP_EXPERTS, arguments_of
from tpcompile.ir.recipe import Recipe, concat, take
from tpcompile.rewriting.rewrite import calls

LAYER = 1


def tied(dtype: torch.dtype, family: str = "qwen3_moe") -> Any:
    """Return a mixture in which pairs of experts have equal logits, and tokens choose three."""
    sizes = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    kinds = ["linear_attention", "full_attention"]
    layers = {"num_hidden_layers": 2} | ({"layer_types": kinds} if family in HYBRIDS else {})
    model = lively_mixture(random_mixture(0, family, **layers, **sizes, **sparse))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2]
    return model.to(dtype)


def _next_expert(parameter: fx.Node) -> None:
    """Give each expert the weights of the next one."""

    def turned(recipe: Recipe, count: int) -> Recipe:
        return concat([take(recipe, 0, 2, count), take(recipe, 0, 0, 2)], 0)

    known = parameter_of(parameter)
    count = known.type.shape[0]
    assert isinstance(count, int)
    set_parameter(parameter, replace(known, shards=tuple(turned(s, count) for s in known.shards)))


def other_order_of_router(gm: fx.GraphModule) -> None:
    _next_expert(operand(operand(calls(gm, TOP_EXPERTS)[LAYER]), 1))


def not_normalised(gm: fx.GraphModule) -> None:
    calls(gm, TOP_EXPERTS)[LAYER].update_arg(2, False)


def other_gate_and_up(gm: fx.GraphModule) -> None:
    _next_expert(arguments_of(calls(gm, EXPERTS)[LAYER])["gate_up"])


def logits_of_another_layer(gm: fx.GraphModule) -> None:
    first, second = calls(gm, TOP_EXPERTS)
    second.update_arg(0, operand(first))


MISTAKES: dict[Callable[[fx.GraphModule], None], tuple[str, str]] = {
    other_order_of_router: ("l1_gate", "router"),
    not_normalised: ("l1_top_experts_1_scores", "scores"),
    logits_of_another_layer: ("l1_top_experts_1_ids", "choice"),
    other_gate_and_up: ("l1_experts", "mlp_residual"),
}
"""The value of the graph, and the group of the torch module, where a mistake is found."""
