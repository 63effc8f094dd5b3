"""Conversion of a Qwen3 or Qwen3.5 checkpoint to a GGUF file, with the same weights.

Matrices stay in the dtype of the checkpoint; vectors and the taps of convolutions are fp32, as
llama.cpp requires. Rotation in pairs of halves (NEOX) is that of Hugging Face, so the rows of Q and
K stay in their order. Linear attention must have as many value heads as key heads, whose order is
then the same in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.words import words_of

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
LINEAR_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
"""Names of models with layers of linear attention."""
ARCHITECTURES = {"qwen3": "qwen3", "qwen3_5_text": "qwen35"}
"""llama.cpp's names of model types."""
TYPES = {"BF16": gguf.GGMLQuantizationType.BF16, "F32": gguf.GGMLQuantizationType.F32}


def shared_gguf(directory: Path) -> Path:
    """Return the GGUF file of a checkpoint; write it if no side has done so."""
    path = directory / "model.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        write_gguf(directory, unfinished)
        unfinished.rename(path)
    return path


def write_gguf(directory: Path, file: Path) -> None:
    """Write the safetensors files of `directory`, and what its configuration says."""
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"the GGUF writer supports {', '.join(ARCHITECTURES)}, got {kind}")
    writer = gguf.GGUFWriter(file, ARCHITECTURES[kind], use_temp_file=False)
    _describe(writer, config)
    is_linear = "linear_num_key_heads" in config
    if is_linear:
        _describe_linear(writer, config)
    for path in sorted(directory.glob("*.safetensors")):
        for name, (dtype, array) in _tensors(path):
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            converted = _linear(name, dtype, array) if is_linear else (dtype, array)
            _add(writer, _name(name, LINEAR_NAMES if is_linear else LAYER_NAMES), *converted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_words(writer, config["vocab_size"])


def _describe_linear(writer: Any, config: Mapping[str, Any]) -> None:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys != values:
        raise ValueError(f"expected as many value heads as key heads, got {values} and {keys}")
    kinds, rope = config["layer_types"], config["rope_parameters"]
    writer.add_full_attention_interval(1 + kinds.index("full_attention"))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def _linear(name: str, dtype: str, array: Any) -> tuple[str, Any]:
    """Return a tensor of a model with linear attention as llama.cpp wants it."""
    if name.endswith("conv1d.weight"):
        return "F32", _wide(dtype, array)[:, 0]
    if name.endswith("A_log"):
        return "F32", -np.exp(_wide(dtype, array))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return "F32", 1 + _wide(dtype, array)  # norms are zero-centred
    return dtype, array


def _wide(dtype: str, array: Any) -> Any:
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def _add_words(writer: Any, vocabulary: int) -> None:
    """Add a word for each token, because a server makes text of tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([words_of([token]) for token in range(vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(["t 0"])  # it must have one


def _add(writer: Any, name: str, dtype: str, array: Any) -> None:
    if array.ndim > 1:
        writer.add_tensor(name, array.view(np.uint8), raw_dtype=TYPES[dtype])
    else:
        writer.add_tensor(name, _wide(dtype, array))


def _name(name: str, names: Mapping[str, str]) -> str:
    if name in NAMES:
        return NAMES[name]
    layer, _, parameter = name.removeprefix("model.layers.").partition(".")
    stem = parameter.removesuffix(".weight")
    return f"blk.{layer}.{names[stem]}{parameter[len(stem) :]}"


def _tensors(path: Path) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Map each tensor of a safetensors file. numpy has no bf16, so its bits are given as uint16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, _ = entry["data_offsets"]
        number = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
        array = np.memmap(path, number, "r", 8 + size + begin, tuple(entry["shape"]))
        yield name, (entry["dtype"], array)
