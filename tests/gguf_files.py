"""GGUF files that the library gguf writes, and the models that it reads from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from tpcompile.presets import preset

SMALL = {"vocab_size": 101, "num_hidden_layers": 2}
ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
_WITHOUT = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
"""The kinds that the library reads, but does not make."""
_SCALES = {Kind.Q4_K: (0, 1), Kind.Q5_K: (0, 1), Kind.Q6_K: (104,)}
"""The places of scales in blocks of halves."""


def model_of(name: str = "tiny-qwen3", **changes: Any) -> Any:
    """Return a model with random weights, in fp32."""
    torch.manual_seed(sum(map(ord, f"{name}{changes}")))
    config = AutoConfig.for_model(**{**preset(name), **SMALL, **changes})
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
    parts: int = 1,
) -> Any:
    """Write a model as a GGUF file; put the values that the library reads back into the model.

    `kinds` are those of tensors by the end of their names in the file. `more` are further
    properties of the file, such as the tokens of a tokenizer. With several `parts`, the result is
    that many files, of which the first is `path`.
    """
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    limit = -(-len(model.state_dict()) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, config.model_type, split_max_tensors=limit)
    _describe(writer, config)
    for key, value in (more or {}).items():
        _add(writer, key, value)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if config.tie_word_embeddings and name == "lm_head.weight":
                continue
            stem, _, end = name.rpartition(".")
            own = f"{names.get_name(stem)}.{end}"
            chosen = next((k for e, k in (kinds or {}).items() if own.endswith(e)), kind)
            if tensor.dim() == 1:
                chosen = Kind.F32
            elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
                chosen = Kind.F16  # as llama.cpp does
            data = (
                blocks(tensor, chosen) if chosen in _WITHOUT else quantize(tensor.numpy(), chosen)
            )
            tensor.copy_(torch.from_numpy(np.array(dequantize(data, chosen))).view(tensor.shape))
            writer.add_tensor(own, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks(tensor: torch.Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """Return random blocks for a tensor, of about its magnitude."""
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    shape = *tensor.shape[:-1], tensor.shape[-1] // columns
    found = torch.randint(256, (*shape, size), dtype=torch.uint8)
    halves = found.view(torch.float16)
    for place in _SCALES[kind]:
        halves[..., place] = torch.rand(shape) * tensor.std() / 500
    return found.flatten(-2).numpy()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None)
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
