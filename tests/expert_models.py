"""Small mixtures of experts with random weights, and pipelines that shard their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tpcompile.passes import Pass, default_pipeline, pipeline_text
from tpcompile.passes.plan_sharding import PlanSharding

VOCABULARY = 101
FEATURES, EXPERTS = 48, 5
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": FEATURES,
    "shared_expert_intermediate_size": 48,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
IDS = torch.arange(3, 25).reshape(2, 11) * 7 % VOCABULARY


def mixture_config(kind: str = "qwen3_moe", **changes: Any) -> Any:
    """Return the configuration of a tiny mixture of experts."""
    return AutoConfig.for_model(kind, **{**SIZES, **changes})


def mixture(kind: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Any:
    """Return a tiny mixture of experts in fp32, whose router chooses every expert."""
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    model = make(mixture_config(kind, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.normal_(0, 0.3)
    return model


def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of `IDS`."""
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def sharding(experts: str, tp: int) -> list[Pass]:
    """Return the standard passes with this plan for experts."""
    return [
        replace(one, experts=experts) if isinstance(one, PlanSharding) else one
        for one in default_pipeline(tp)
    ]


def pipeline(experts: str, tp: int) -> str:
    """Return the same passes as text."""
    passes: Sequence[Pass] = sharding(experts, tp)
    return pipeline_text(passes)
