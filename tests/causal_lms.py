"""Small configurations of all causal LMs in Hugging Face, their weights, and known refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
WINDOW = 5
MOST_PARAMETERS = 1_000_000

_KIND_OF_CONFIG = {name: kind for kind, name in CONFIG_MAPPING_NAMES.items()}
KINDS = sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DECODER: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "is_decoder": True,
}
SMALL = {**_TEXT, **_EXPERTS, **_LATENT, **_DECODER}
"""Settings under all names that configurations use; each class takes the ones it defines."""

_NO_TYPES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _NO_TYPES, "full_attention": _NO_TYPES},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "fuyu": {"text_config": {**_TEXT, "model_type": "persimmon"}},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "olmo_hybrid": _HYBRID,
    "qwen3_5": {"text_config": {**_TEXT, **_HYBRID}},
    "qwen3_5_moe": {"text_config": {**_TEXT, **_EXPERTS, **_HYBRID}},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _HYBRID),
    "moshi": {"audio_vocab_size": 32},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"],
    },
    "zamba": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid"],
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional settings per class, where the small settings alone cannot be built."""

NOT_BUILT: dict[str, str] = {
    "dots3_note": "its text configuration names layers beyond a small number of them",
    "gemma4_assistant": "its own check refuses small text configurations: no layer writes a cache",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "musicgen": "from_config reads settings that only the decoder's configuration has",
    "musicgen_melody": "from_config reads settings that only the decoder's configuration has",
}
"""Classes that Hugging Face cannot build from a small configuration, with the reason."""

NEEDED_PACKAGES: dict[str, str] = {"gemma3n": "timm"}
"""Classes that require an additional package."""

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": True}),
    ("cohere", {"attention_bias": True, "logit_scale": 0.5}),
    ("cohere2", {"num_hidden_layers": 3, "layer_types": SLIDING}),
    ("ernie4_5", {"use_bias": True}),
    ("exaone4", {"num_hidden_layers": 3, "layer_types": SLIDING}),
    ("glm4", {"attention_bias": True, "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 1}}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", {"rope_parameters": {**_PARTIAL, "partial_rotary_factor": 1.0}}),
    ("granite", {**_GRANITE, "tie_word_embeddings": True}),
    ("granite", {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"sliding_window": None, "num_key_value_heads": 1}),
    ("phi3", {"head_dim": 16, "hidden_size": 64, "rope_parameters": _PARTIAL}),
    ("starcoder2", {"use_bias": False, "sliding_window": None, "num_key_value_heads": 1}),
    ("cwm", {"num_hidden_layers": 5}),
    ("cwm", {"layer_types": SLIDING, "num_hidden_layers": 3}),
    ("hyperclovax", {"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    ("hyperclovax", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": _PARTIAL}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    ("ministral", {"num_hidden_layers": 4}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"num_hidden_layers": 3, "use_sliding_window": True, "layer_types": SLIDING}),
    ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"]}),
    ("qwen3_next", {"mlp_only_layers": [0, 1]}),
    ("seed_oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"num_hidden_layers": 5}),
    ("smollm3", {"num_hidden_layers": 3, "layer_types": SLIDING}),
]
"""Other settings of classes that compile: windows, biases, tying, mixed layer types."""

EQUAL = frozenset(
    {
        *("llama", "mistral", "seed_oss", "smollm3", "arcee", "ministral"),
        *("phi", "phi3", "granite", "starcoder2", "olmo", "gpt_neox"),
        *("glm", "glm4", "cohere", "cohere2", "helium", "ernie4_5"),
        "exaone4",
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    }
)
"""Classes that must compile with any version of Hugging Face."""

REASONS: dict[str, str] = {
    "encoder": r"is an encoder",
    "more than text": r"takes inputs other than text",
    "layers of other kinds": r"has .*layers of kind ",
    "linear attention alone": r"has .*linear attention in all of its layers",
    "complex rotary": r"has .*rotary tables of complex numbers",
    "half-width rotary": r"has .*rotary tables of half the rotated width",
    "rotary per layer type": r"has .*a rotary table per layer type",
    "several rotary modules": r"has .*\d+ rotary modules",
    "experts without the interface": r"has .*a mixture of \d+ experts",
    "other experts": r"has .*experts (with|without|that apply) ",
    "other router": r"has a router of another form",
    "branches on values": r"branches on values that it computes",
    "heads of two widths": r"has .*heads of two widths",
    "no rotary": r"has .*no rotary position embedding",
    "cross-attention": r"has .*attention that is not causal",
    "attention interface": r"has .*no attention that goes through Hugging Face's",
    "attention option": r"uses (softcap|s_aux|position_bias) in its attention",
    "mask of its own": r"attention masks? (of a layer cannot|, or one)|was given (a|no) mask"
    r"|computes with its attention mask|uses an attention mask that is not an argument"
    r"|separate packed sequences",
    "layers called otherwise": r"does not call layer|does not call each of its layers once",
    "between layers": r"computes something between its layers",
    "buffer": r"reads the buffer",
    "fused heads": r"the projection of its heads must be a separate linear",
    "operation without a rule": r"computes \S+, which tpcompile cannot shard",
    "another form of an operation": r"in a form that tpcompile cannot shard "
    r"\(rule (slice|repeat-heads|floating)\)",
    "keywords not passed on": r"gets no keyword arguments from its layer",
    "another MLP": r"There is no SwiGLU in the graph",
    "norm after rotation": r"normalises heads after it rotates them",
    "another norm": r"There is no RMS norm in the graph",
    "another split of heads": r"There is no attention in token-major form",
    "norm of all heads": r"normalises all heads together",
}
"""Regular expressions of known refusals; the first match is the reason."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return a configuration of this kind with small settings."""
    values = {**_small_values(CONFIG_MAPPING[kind]), **OVERRIDES.get(kind, {}), **changes}
    return AutoConfig.for_model(kind, **values)


def _small_values(kind: Any) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    known = {name: value for name, value in SMALL.items() if name in names}
    values: dict[str, Any] = {kind.attribute_map.get(n, n): value for n, value in known.items()}
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if dataclasses.is_dataclass(part):
            values[name] = _small_values(part)
    return values


def tiny_model(config: Any, *, on_meta: bool = False) -> Any:
    """Return Hugging Face's eager model in fp32, in eval mode, with weights from a fixed seed."""
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    if not on_meta:
        _randomise(model)
    return model.eval()


def _randomise(model: Any) -> None:
    """Randomise all parameters; scales of 1 and biases of 0 would hide that they are lost."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise + (0.0 if "bias" in name else 1.0))


def cannot_be_built(kind: str) -> bool:
    """Return whether this environment cannot build the class."""
    needed = NEEDED_PACKAGES.get(kind)
    return kind in NOT_BUILT or (needed is not None and importlib.util.find_spec(needed) is None)


def is_mapped(kind: str) -> bool:
    """Return whether Hugging Face finds the model of this kind; kinds may share a class."""
    return _KIND_OF_CONFIG[CONFIG_MAPPING_NAMES[kind]] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
