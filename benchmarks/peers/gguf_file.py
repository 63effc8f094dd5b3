"""Conversion of a Qwen3 checkpoint to a GGUF file, with the same weights.

Matrices stay in the dtype of the checkpoint and vectors are fp32, as llama.cpp requires. Rotation
in pairs of halves (NEOX) is that of Hugging Face, so the rows of Q and K stay in their order.
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
}
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
    if config["model_type"] != "qwen3":
        raise ValueError(f"the GGUF writer supports qwen3 models, got {config['model_type']}")
    writer = gguf.GGUFWriter(file, "qwen3", use_temp_file=False)
    _describe(writer, config)
    for path in sorted(directory.glob("*.safetensors")):
        for name, (dtype, array) in _tensors(path):
            if name == "lm_head.weight" and config["tie_word_embeddings"]:
                continue
            _add(writer, _name(name), dtype, array)
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
    elif dtype == "BF16":
        writer.add_tensor(name, (array.astype(np.uint32) << 16).view(np.float32))
    else:
        writer.add_tensor(name, array)


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


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
