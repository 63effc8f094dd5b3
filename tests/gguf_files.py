"""GGUF files that the library gguf writes, and the models that it reads from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from tests import gguf_hybrids
from tpcompile.frontend.source import config_of
from tpcompile.presets import preset

SMALL = {"vocab_size": 101, "num_hidden_layers": 2}
ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
_WITHOUT = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""The kinds that the library reads, but does not make."""
_SCALES = {Kind.Q4_K: (0, 1), Kind.Q5_K: (0, 1), Kind.Q6_K: (104,)}
"""The places of scales in blocks of halves."""


def model_of(name: str = "tiny-qwen3", **changes: Any) -> Any:
    """Return a model with random weights, in fp32."""
    torch.manual_seed(sum(map(ord, f"{name}{changes}")))
    base = LLAMA if name == "tiny-llama" else preset(name)
    config = AutoConfig.for_model(**{**base, **SMALL, **changes})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).mul_(0.1))
    return model


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.Q8_0,
    *,
    kinds: Mapping[str, Kind] | None = None,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], Kind]] | None = None,
    parts: int = 1,
) -> Any:
    """Write a model as a GGUF file; put the values that the library reads back into the model.

    `kinds` are those of tensors by the end of their names in the file. `more` are further
    properties of the file, such as the tokens of a tokenizer, or others than those of the model;
    `tensors` are further ones. With several `parts`, the result is that many files, of which the
    first is `path`.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    limit = -(-len(model.state_dict()) // parts) if parts > 1 else 0
    name_of = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(path, name_of, split_max_tensors=limit)
    _describe(writer, config)
    for key, value in (more or {}).items():
        _add(writer, key, value)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor, index in _parts(config, state):
            if config.tie_word_embeddings and name == "lm_head.weight":
                continue
            file_name = _name(names, name)
            rows = _stored(config, file_name, tensor[index]).contiguous()
            chosen = next((k for e, k in (kinds or {}).items() if file_name.endswith(e)), kind)
            if rows.dim() == 1 or "conv1d" in file_name:
                chosen = Kind.F32
            elif rows.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
                chosen = Kind.F16  # as llama.cpp does
            data = blocks(rows, chosen) if chosen in _WITHOUT else quantize(rows.numpy(), chosen)
            values = torch.from_numpy(np.array(dequantize(data, chosen))).view(rows.shape)
            tensor[index] = _restored(config, file_name, values).view(tensor[index].shape)
            writer.add_tensor(file_name, data, raw_dtype=chosen)
        for name, (stored, kind) in (tensors or {}).items():
            writer.add_tensor(name, stored, raw_dtype=kind)
        if config.rope_parameters["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", rotary_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _parts(config: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """Yield tensors of a model, and the index of the rows of each tensor of a file."""
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            half = tensor.shape[1] // 2
            yield f"{path}.gate_proj.weight", tensor, (slice(None), slice(half))
            yield f"{path}.up_proj.weight", tensor, (slice(None), slice(half, None))
        elif path.endswith("in_proj_qkvz"):
            for part, rows in gguf_hybrids.fused_rows(config).items():
                yield f"{path.replace('qkvz', part)}.weight", tensor, rows
        else:
            yield (f"{name}.weight" if leaf == "down_proj" else name), tensor, ...


def _name(names: Any, name: str) -> str:
    """Return the name of a tensor in the file."""
    stem, _, end = name.replace(".dt_bias", ".dt_proj.bias").rpartition(".")
    mapped: str | None = names.get_name(name)
    return mapped if mapped is not None else f"{names.get_name(stem)}.{end}"


def _stored(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as llama.cpp's scripts convert it."""
    if config.model_type in _HYBRIDS:
        return gguf_hybrids.stored(config, name, tensor)
    return _paired(tensor, _paired_heads(config, name))


def _restored(config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor as transformers has it."""
    if config.model_type in _HYBRIDS:
        return gguf_hybrids.restored(config, name, values)
    return _halves(values, _paired_heads(config, name))


def _paired_heads(config: Any, name: str) -> int:
    """Return the heads of a tensor whose rows llama.cpp's scripts permute, or 0."""
    if config.model_type != "llama":
        return 0
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return next((count for word, count in heads.items() if f".{word}." in name), 0)


def _paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of llama.cpp: those of the halves of each head in turn."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in the order of transformers."""
    if not heads:
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def rotary_factors(config: Any) -> np.ndarray[Any, Any]:
    """Return the factors of Llama 3, as llama.cpp's scripts compute them from its configuration."""
    parameters, factors = config.rope_parameters, []
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    for place in range(0, config.head_dim, 2):
        wave = 2 * math.pi * parameters["rope_theta"] ** (place / config.head_dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(parameters["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(factors, np.float32)


def blocks(tensor: torch.Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """Return random blocks for a tensor, of about its magnitude."""
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    shape = *tensor.shape[:-1], tensor.shape[-1] // columns
    random_blocks = torch.randint(256, (*shape, size), dtype=torch.uint8)
    halves = random_blocks.view(torch.float16)
    for place in _SCALES[kind]:
        halves[..., place] = torch.rand(shape) * tensor.std() / 500
    return random_blocks.flatten(-2).numpy()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type in _HYBRIDS:
        gguf_hybrids.describe(writer, config)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if width is not None:
        writer.add_key_length(width)
        writer.add_value_length(width)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def check_configuration(path: Path, truth: Any, near: Sequence[str]) -> None:
    """Compare the configuration of a file with the model's; numbers in `near` may be rounded."""
    actual, expected = config_of(str(path)).to_dict(), truth.config.to_dict()
    for name in near:
        assert actual.pop(name) == pytest.approx(expected.pop(name)), name
    left = {"quantization_config", "dtype", "transformers_version", "architectures"}
    left |= {"bos_token_id", "eos_token_id"}
    same = {name for name in actual if name not in left}
    assert {name: actual[name] for name in same} == {name: expected[name] for name in same}
