"""Small mixtures of experts with random weights, and pipelines that shard their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
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


def mixture_of(config: Any, dtype: torch.dtype) -> Any:
    """Return a model of this configuration."""
    make: Any = AutoModelForCausalLM.from_config
    return make(config, dtype=dtype).eval()


def mixture(kind: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Any:
    """Return a tiny mixture of experts in fp32, whose router chooses every expert."""
    torch.manual_seed(seed)
    model = mixture_of(mixture_config(kind, **changes), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.normal_(0, 0.3)
    return model


class _Expert(nn.Module):
    """The linears of an expert, as modules of their own."""

    def __init__(self, sides: torch.Tensor, result: torch.Tensor) -> None:
        super().__init__()
        features = result.shape[1]
        parts = {"gate_proj": sides[:features], "up_proj": sides[features:], "down_proj": result}
        for name, weight in parts.items():
            linear = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            self.add_module(name, linear)


def unstacked(model: Any) -> Any:
    """Replace stacked experts by modules, as checkpoints and other libraries have them."""
    for path, module in list(model.named_modules()):
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            pairs = zip(module.gate_up_proj.data, module.down_proj.data, strict=True)
            experts = nn.ModuleList(_Expert(*pair) for pair in pairs)
            model.set_submodule(path, experts)
    return model


def restacked(model: Any) -> Any:
    """Return a model of Hugging Face with the weights of a model of `unstacked`."""
    if not any(isinstance(module, _Expert) for module in model.modules()):
        return model
    stacked = mixture_of(model.config, model.dtype)
    with torch.no_grad():
        for name, parameter in stacked.named_parameters():
            path, _, leaf = name.rpartition(".")
            if leaf not in ("gate_up_proj", "down_proj"):
                parameter.copy_(model.get_parameter(name))
                continue
            sides = ("down_proj",) if leaf == "down_proj" else ("gate_proj", "up_proj")
            for expert, values in enumerate(parameter):
                parts = [model.get_parameter(f"{path}.{expert}.{side}.weight") for side in sides]
                values.copy_(torch.cat(parts))
    return stacked


def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of `IDS`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def sharding(experts: str, tp: int) -> list[Pass]:
    """Return the standard passes with this plan for experts."""
    return [
        replace(current, experts=experts) if isinstance(current, PlanSharding) else current
        for current in default_pipeline(tp)
    ]


def pipeline(experts: str, tp: int) -> str:
    """Return the same passes as text."""
    passes: Sequence[Pass] = sharding(experts, tp)
    return pipeline_text(passes)
