"""Small random mixtures of experts of all families, with lively weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 101
FAMILIES = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
HYBRIDS = FAMILIES[2:]


def random_mixture(seed: int, family: str, **changes: Any) -> Any:
    """Return a configuration with 2 to 16 experts, of which a token chooses 1 to 8."""
    dice = random.Random(f"{family} {seed}")
    count = (2, 16, 8, 5)[(seed + FAMILIES.index(family)) % 4]
    layers = dice.choice((2, 3))
    drawn: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48 if family == "qwen2_moe" else 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": dice.choice((2, 3)),
        "moe_intermediate_size": dice.choice((5, 8, 12, 17)),
        "num_experts": count,
        "num_experts_per_tok": dice.randint(1, min(count, 8)),
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family != "qwen2_moe":
        drawn["head_dim"] = 16
    if family != "qwen3_moe":
        drawn["shared_expert_intermediate_size"] = dice.choice((6, 16))
    if family in HYBRIDS:
        drawn |= {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"][:layers],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 0.5,
        }
    if family != "qwen3_5_moe_text":
        sparse = dice.choice(({}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}))
        drawn |= {"intermediate_size": 20, "norm_topk_prob": dice.random() < 0.5, **sparse}
    return AutoConfig.for_model(family, **{**drawn, **changes})


def lively_mixture(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return an eager model that runs Hugging Face's loop over experts, with weights of bf16.

    The logits of its routers are far apart, so that few choices are close.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            last = name.rpartition(".")[2]
            if parameter.dim() > 1:
                noise *= (3 if ".mlp.gate." in name else 1) / parameter.shape[-1] ** 0.5
            else:
                centred = config.model_type in HYBRIDS and "linear_attn.norm" not in name
                noise = 0.2 * noise + (0.0 if centred or "bias" in last else 1.0)
            parameter.copy_((noise - float(last == "A_log")).bfloat16())
    return model.to(dtype)
