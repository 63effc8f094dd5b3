"""The official configurations as data: `preset:NAME` needs no download and no weights."""

from __future__ import annotations

import copy
import os
from typing import Any

from tpcompile.errors import UsageError, did_you_mean, spelled

_QWEN25 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "dtype": "bfloat16",
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "head_dim": 128,
    "attention_bias": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attention_bias": False,
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "dtype": "bfloat16",
}

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
_QWEN25_SIZES: dict[str, tuple[int, int, int, int, int, bool, int, float]] = {
    # name: the columns, then vocabulary and norm epsilon, which differ by size
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, True, 151936, 1e-6),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, True, 151936, 1e-6),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, True, 151936, 1e-6),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, False, 152064, 1e-6),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, False, 152064, 1e-5),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, False, 152064, 1e-5),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, False, 152064, 1e-5),
}
_QWEN3_SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
}
_QWEN35_SIZES: dict[str, tuple[int, int, int, int, int, bool, int]] = {
    # name: the columns, then the value heads of linear attention
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, True, 16),
    "qwen3.5-2b": (2048, 6144, 24, 8, 2, True, 16),
    "qwen3.5-4b": (2560, 9216, 32, 16, 4, True, 32),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, False, 32),
    "qwen3.5-27b": (5120, 17408, 64, 24, 4, False, 48),
}
_QWEN2_MOE = {**_QWEN25, "model_type": "qwen2_moe", "vocab_size": 151936, "norm_topk_prob": False}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "norm_topk_prob": True}
_QWEN3_NEXT = {
    **_QWEN35,
    "model_type": "qwen3_next",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "intermediate_size": 5120,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN35_MOE = {**_QWEN35, "model_type": "qwen3_5_moe_text"}
_MOE_COLUMNS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)
_MOE_SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # name: the columns, then the family and what else differs by size
    "qwen1.5-moe-a2.7b": (
        (2048, 24, 16, 16, 1408, 60, 4),
        {
            **_QWEN2_MOE,
            "intermediate_size": 5632,
            "shared_expert_intermediate_size": 5632,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen2-57b-a14b": (
        (3584, 28, 28, 4, 2560, 64, 8),
        {**_QWEN2_MOE, "intermediate_size": 18944, "shared_expert_intermediate_size": 20480},
    ),
    "qwen3-30b-a3b": ((2048, 48, 32, 4, 768, 128, 8), {**_QWEN3_MOE, "intermediate_size": 6144}),
    "qwen3-235b-a22b": (
        (4096, 94, 64, 4, 1536, 128, 8),
        {**_QWEN3_MOE, "intermediate_size": 12288},
    ),
    "qwen3-next-80b-a3b": (
        (2048, 48, 16, 2, 512, 512, 10),
        {**_QWEN3_NEXT, "shared_expert_intermediate_size": 512},
    ),
    "qwen3.5-35b-a3b": (
        (2048, 40, 16, 2, 512, 256, 8),
        {**_QWEN35_MOE, "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32},
    ),
    "qwen3.5-397b-a17b": (
        (4096, 60, 32, 2, 1024, 512, 10),
        {**_QWEN35_MOE, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64},
    ),
}
_TINY_HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 1013,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "float32",
}

_TINY_MOE = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}

DENSE = (*_QWEN25_SIZES, *_QWEN3_SIZES)
"""The official dense models without linear attention."""
HYBRID = tuple(_QWEN35_SIZES)
"""The official dense models with linear attention."""
MIXTURES = tuple(_MOE_SIZES)
"""The official mixtures of experts."""


def _presets() -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = {}
    for name, (*sizes, vocab, eps) in _QWEN25_SIZES.items():
        settings = dict(zip(_COLUMNS, sizes, strict=True))
        configs[name] = {**_QWEN25, **settings, "vocab_size": vocab, "rms_norm_eps": eps}
    for name, row in _QWEN3_SIZES.items():
        configs[name] = {**_QWEN3, **dict(zip(_COLUMNS, row, strict=True))}
    for name, (*sizes, values) in _QWEN35_SIZES.items():
        settings = dict(zip(_COLUMNS, sizes, strict=True))
        configs[name] = {**_QWEN35, **settings, "linear_num_value_heads": values}
    for name, (columns, family) in _MOE_SIZES.items():
        settings = dict(zip(_MOE_COLUMNS, columns, strict=True))
        configs[name] = {**family, **settings, "tie_word_embeddings": False}
    configs["tiny-qwen2"] = {**_QWEN25, **_TINY, "hidden_size": 96}
    configs["tiny-qwen3"] = {**_QWEN3, **_TINY, "head_dim": 16}
    configs["tiny-qwen3-moe"] = {**_QWEN3_MOE, **_TINY, **_TINY_MOE, "head_dim": 16}
    configs["tiny-qwen3.5"] = {**_QWEN35, **_TINY, **_TINY_HYBRID}
    configs["tiny-qwen3.5-moe"] = {
        **_QWEN35_MOE,
        **_TINY,
        **_TINY_HYBRID,
        **_TINY_MOE,
        "shared_expert_intermediate_size": 80,
    }
    del configs["tiny-qwen3.5-moe"]["intermediate_size"]
    return configs


PRESETS = _presets()


def preset(name: str) -> dict[str, Any]:
    """Return the configuration of a preset, `model_type` included. Names ignore case."""
    spelling = spelled(name, PRESETS)
    if spelling is None:
        raise UsageError(f"There is no preset {name!r}", hint=did_you_mean(name, PRESETS))
    return copy.deepcopy(PRESETS[spelling])


def check_model_name(model: str) -> None:
    """Refuse invalid names that can be detected without torch and without a network."""
    if model.startswith("preset:"):
        preset(model.removeprefix("preset:"))
    elif os.path.exists(model):  # Path.exists raises if a name is too long
        return
    elif spelled(model, PRESETS):
        raise UsageError(
            f"There is no directory {model}",
            hint=f"To use the preset, write preset:{model.lower()}",
        )
    elif model.startswith((".", "/", "~")):
        raise UsageError(
            f"There is no directory {model}",
            expected="a directory with a config.json, a GGUF file, a hub id, or preset:NAME",
        )
