"""Models in GGUF files: the names of their tensors and their configuration, as in transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf.file import GgufFile, GgufTensor
from tpcompile.json_files import shortened

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_OUTER = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class _Architecture:
    """How the metadata of an architecture becomes a configuration."""

    model_type: str
    heads_have_widths: bool = False
    """Whether heads have a width of their own, `head_dim`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further properties of the configuration."""


_ARCHITECTURES = {
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", heads_have_widths=True, more={"attention_bias": False}),
}
_COUNTS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_READ = frozenset(
    (
        *_COUNTS.values(),
        *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        "rope.dimension_count",
    )
)
"""The properties of an architecture that are read. Others are refused: they may change numbers."""


def tensors_of(file: GgufFile) -> dict[str, GgufTensor]:
    """Return the tensors by the names that the model has in transformers."""
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        inner = _BLOCK.fullmatch(name)
        if name in _OUTER:
            found[_OUTER[name]] = tensor
        elif inner is not None and inner[2] in _INNER:
            found[f"model.layers.{int(inner[1])}.{_INNER[inner[2]]}.{inner[3]}"] = tensor
        else:
            raise CheckpointError(
                f"The file holds a tensor that the model does not have: {shortened(name)}",
                where=str(tensor.path),
                expected="only the tensors of the model",
            )
    return found


def configuration(file: GgufFile) -> dict[str, Any]:
    """Return the configuration that a file describes, `model_type` included."""
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            "tpcompile does not read GGUF files of this architecture",
            where=str(file.path),
            got=shortened(repr(name)),
            expected=" or ".join(_ARCHITECTURES),
            hint="Use a checkpoint of Hugging Face",
        )
    known, told = _ARCHITECTURES[name], _Told(file, name)
    told.refuse_others()
    tensors = tensors_of(file)
    if EMBEDDING not in tensors:
        raise CheckpointError("The file lacks the tensor token_embd.weight", where=str(file.path))
    rows = tensors[EMBEDDING].shape[0]
    if told.count("vocab_size", rows) != rows:
        told.refuse("vocab_size", f"{rows}, the rows of the embedding")
    found: dict[str, Any] = {key: told.count(word) for key, word in _COUNTS.items()}
    if found["num_hidden_layers"] > len(tensors):
        told.refuse("block_count", f"at most one for each of {len(tensors)} tensors")
    found |= {
        "model_type": known.model_type,
        "num_key_value_heads": told.count("attention.head_count_kv", found["num_attention_heads"]),
        "vocab_size": rows,
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": told.rope(found["max_position_embeddings"]),
        "tie_word_embeddings": HEAD not in tensors,
        **known.more,
    }
    width = _width_of_heads(told, known)
    if known.heads_have_widths:
        found["head_dim"] = width
    for word in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{word}_token_id")
        if token is not None:
            found[f"{word}_token_id"] = told.token(word, token, rows)
    return found


def _width_of_heads(told: _Told, known: _Architecture) -> int:
    heads, hidden = told.count("attention.head_count"), told.count("embedding_length")
    width = told.count("attention.key_length", hidden // heads)
    if told.count("attention.value_length", width) != width:
        told.refuse("attention.value_length", f"the key_length {width}")
    if not known.heads_have_widths and width * heads != hidden:
        told.refuse(
            "attention.key_length", f"{hidden // heads}, as {heads} heads are {hidden} wide"
        )
    if told.count("rope.dimension_count", width) != width:
        told.refuse("rope.dimension_count", f"the width of a head, {width}")
    return width


class _Told:
    """The metadata of an architecture."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self._file, self._prefix = file, f"{name}."

    def refuse_others(self) -> None:
        """Raise for properties that are not read."""
        for key in self._file.metadata:
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in _READ:
                raise UnsupportedError(
                    "tpcompile does not read this property of a GGUF file",
                    where=str(self._file.path),
                    got=shortened(key),
                    hint="Use a checkpoint of Hugging Face",
                )

    def count(self, word: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self._file.metadata.get(self._prefix + word, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            self.refuse(word, "a positive integer")
        return int(value)

    def number(self, word: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._file.metadata.get(self._prefix + word, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(word, "a positive number")
        return float(value)

    def token(self, word: str, value: Any, vocabulary: int) -> int:
        """Return the id of a token."""
        if type(value) is not int or not 0 <= value < vocabulary:
            raise CheckpointError(
                f"The id of the token {word} is not valid",
                where=str(self._file.path),
                got=shortened(repr(value)),
                expected=f"0 to {vocabulary - 1}",
            )
        return value

    def rope(self, positions: int) -> dict[str, Any]:
        """Return the parameters of rotary tables."""
        found: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self._file.metadata.get(f"{self._prefix}rope.scaling.type", "none")
        if kind == "none":
            return {"rope_type": "default", **found}
        if kind != "yarn":
            self.refuse("rope.scaling.type", "none or yarn")
        factor = self.number("rope.scaling.factor")
        original = self.count("rope.scaling.original_context_length", positions)
        more = {"factor": factor, "original_max_position_embeddings": original}
        return {"rope_type": "yarn", **found, **more}

    def refuse(self, word: str, expected: str) -> None:
        """Raise for a property with another value."""
        key = self._prefix + word
        raise CheckpointError(
            "The metadata of a GGUF file is not valid",
            where=str(self._file.path),
            got=f"{key}={shortened(repr(self._file.metadata.get(key)))}",
            expected=expected,
        )
