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

DENSE = (*_QWEN25_SIZES, *_QWEN3_SIZES)
"""The official dense models without linear attention."""
HYBRID = tuple(_QWEN35_SIZES)
"""The official dense models with linear attention."""


def _presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (*sizes, vocab, eps) in _QWEN25_SIZES.items():
        own = dict(zip(_COLUMNS, sizes, strict=True))
        found[name] = {**_QWEN25, **own, "vocab_size": vocab, "rms_norm_eps": eps}
    for name, row in _QWEN3_SIZES.items():
        found[name] = {**_QWEN3, **dict(zip(_COLUMNS, row, strict=True))}
    for name, (*sizes, values) in _QWEN35_SIZES.items():
        own = dict(zip(_COLUMNS, sizes, strict=True))
        found[name] = {**_QWEN35, **own, "linear_num_value_heads": values}
    found["tiny-qwen2"] = {**_QWEN25, **_TINY, "hidden_size": 96}
    found["tiny-qwen3"] = {**_QWEN3, **_TINY, "head_dim": 16}
    found["tiny-qwen3.5"] = {**_QWEN35, **_TINY, **_TINY_HYBRID}
    return found


PRESETS = _presets()


def preset(name: str) -> dict[str, Any]:
    """Return the configuration of a preset, `model_type` included. The name is in any case."""
    found = spelled(name, PRESETS)
    if found is None:
        raise UsageError(f"There is no preset {name!r}", hint=did_you_mean(name, PRESETS))
    return copy.deepcopy(PRESETS[found])


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
