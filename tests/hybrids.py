"""Small random configurations with linear attention, and models with lively weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 101

FAMILIES: dict[str, list[dict[str, Any]]] = {
    "qwen3_5_text": [{}],
    "qwen3_next": [
        {"num_experts": 0},
        {"mlp_only_layers": [0, 1, 2, 3]},
        {"decoder_sparse_step": 5},
    ],
}
"""Classes with linear attention, each with all ways to have no experts in up to four layers."""


def random_config(seed: int, family: str = "qwen3_5_text", **changes: Any) -> Any:
    """Return a configuration with head counts from 1 to 8, of any shape that the class has."""
    dice = random.Random(seed)
    keys = dice.randint(1, 4)
    values = keys * dice.randint(1, 8 // keys)
    kv_heads = dice.choice((1, 2, 3, 4))
    heads = kv_heads * dice.randint(1, 8 // kv_heads)
    interval = dice.randint(1, 4)
    drawn = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": max(interval, 2),
        "full_attention_interval": interval,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": dice.choice((4, 8, 16)),
        "linear_value_head_dim": dice.choice((4, 8, 16)),
        "linear_conv_kernel_dim": dice.randint(2, 4),
        "attention_bias": dice.random() < 0.5,
        "tie_word_embeddings": dice.random() < 0.5,
        "partial_rotary_factor": dice.choice((0.25, 0.5, 1.0)),
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    dense = FAMILIES[family][seed % len(FAMILIES[family])]
    return AutoConfig.for_model(family, **{**drawn, **dense, **changes})


def most_ranks(config: Any) -> int:
    """Return the largest tp: each rank has a query head and a value head."""
    linear = "linear_attention" in config.layer_types
    values = config.linear_num_value_heads if linear else config.num_attention_heads
    return int(min(values, config.num_attention_heads))


def lively_hybrid(config: Any, seed: int = 0) -> Any:
    """Return an eager model in fp32 whose layers all change the logits; bf16 has its weights."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            last = name.rpartition(".")[2]
            if parameter.dim() > 1:
                noise /= parameter.shape[-1] ** 0.5
            else:
                noise = 0.2 * noise + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
            parameter.copy_((noise - float(last == "A_log")).bfloat16())
    return model
