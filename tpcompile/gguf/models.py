"""Models in GGUF files: the names of their tensors and their configuration, as in transformers."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf.file import GgufFile, GgufTensor
from tpcompile.gguf.kinds import GgufKind
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
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_AS_MANY_AS = {_KV_HEADS: _HEADS}
"""Counts that a file may leave out if they equal another one."""
_ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor with numbers by which the frequencies of rotary tables are divided."""
_ENDS = ("eos", "eot", "eom")
"""The words of tokens that end a text, a turn, or a message before a tool answers."""
_TEXTS_OF_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
        *("<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>"),
    )
)
"""The texts by which llama.cpp finds such tokens, because many files do not name them."""


@dataclass(frozen=True)
class _Architecture:
    """How the metadata of an architecture becomes a configuration."""

    model_type: str
    heads_have_widths: bool = False
    """Whether heads have a width of their own, `head_dim`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further properties of the configuration."""
    told_by: Mapping[str, str] = field(default_factory=dict)
    """Properties of the configuration that say whether the model has a tensor."""
    paired: Mapping[str, str] = field(default_factory=dict)
    """The tensors whose rows are stored in pairs, and the property with the number of heads.

    llama.cpp rotates neighbours of a head in these architectures, and transformers its halves."""
    rotary_factors: bool = False
    """Whether a file may have factors of rotary tables."""


_ARCHITECTURES = {
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", heads_have_widths=True, more={"attention_bias": False}),
    "llama": _Architecture(
        "llama",
        heads_have_widths=True,
        told_by={
            "attention_bias": "model.layers.0.self_attn.q_proj.bias",
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias",
        },
        paired={"attn_q": _HEADS, "attn_k": _KV_HEADS},
        rotary_factors=True,
    ),
}
_COUNTS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": _HEADS,
}
_READ = frozenset(
    (
        *_COUNTS.values(),
        *(_KV_HEADS, "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        "rope.dimension_count",
    )
)
"""The properties of an architecture that are read. Others are refused: they may change numbers."""


def tensors_of(file: GgufFile) -> dict[str, GgufTensor]:
    """Return the tensors by the names that the model has in transformers."""
    known, told = _architecture(file)
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        inner = _BLOCK.fullmatch(name)
        if name in _OUTER:
            found[_OUTER[name]] = tensor
        elif inner is not None and inner[2] in _INNER:
            own = f"model.layers.{int(inner[1])}.{_INNER[inner[2]]}.{inner[3]}"
            paired = known.paired.get(inner[2])
            found[own] = tensor if paired is None else _paired(name, tensor, told.count(paired))
        elif name != _ROTARY_FACTORS or not known.rotary_factors:
            raise CheckpointError(
                f"The file holds a tensor that the model does not have: {shortened(name)}",
                where=str(tensor.path),
                expected="only the tensors of the model",
            )
    return found


def _paired(name: str, tensor: GgufTensor, heads: int) -> GgufTensor:
    if tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"The tensor {name} must have an even number of rows per head",
            where=str(tensor.path),
            got=f"{tensor.shape[0]} rows",
            expected=f"a multiple of {2 * heads}",
        )
    return replace(tensor, paired_heads=heads)


def _architecture(file: GgufFile) -> tuple[_Architecture, _Told]:
    """Return the architecture of a file, and its metadata."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise UnsupportedError(
            "tpcompile does not read GGUF files of this architecture",
            where=str(file.path),
            got=shortened(repr(name)),
            expected=" or ".join(_ARCHITECTURES),
            hint="Use a checkpoint of Hugging Face",
        )
    return _ARCHITECTURES[name], _Told(file, name)


def configuration(file: GgufFile) -> dict[str, Any]:
    """Return the configuration that a file describes, `model_type` included."""
    known, told = _architecture(file)
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
        "num_key_value_heads": told.count(_KV_HEADS),
        "vocab_size": rows,
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in tensors,
        **known.more,
        **{key: tensor in tensors for key, tensor in known.told_by.items()},
    }
    width = _width_of_heads(told, known)
    found["rope_parameters"] = told.rope(found["max_position_embeddings"], width)
    if known.heads_have_widths:
        found["head_dim"] = width
    ends = told.ends(rows)
    found["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    found["bos_token_id"] = told.token("bos", rows)
    return found


def _width_of_heads(told: _Told, known: _Architecture) -> int:
    heads, hidden = told.count(_HEADS), told.count("embedding_length")
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
        if self._prefix + word not in self._file.metadata:
            word = _AS_MANY_AS.get(word, word)
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

    def ends(self, vocabulary: int) -> list[int]:
        """Return the tokens that end a text or a turn: by their names, or by their texts."""
        named = [self.token(word, vocabulary) for word in _ENDS]
        texts = self._file.metadata.get("tokenizer.ggml.tokens")
        known = texts[:vocabulary] if isinstance(texts, list) else []
        found = [number for number, text in enumerate(known) if text in _TEXTS_OF_ENDS]
        return list(dict.fromkeys([*(one for one in named if one is not None), *found]))

    def token(self, word: str, vocabulary: int) -> int | None:
        """Return the id of a token, or None if the file does not tell it."""
        value = self._file.metadata.get(f"tokenizer.ggml.{word}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < vocabulary:
            raise CheckpointError(
                f"The id of the token {word} is not valid",
                where=str(self._file.path),
                got=shortened(repr(value)),
                expected=f"0 to {vocabulary - 1}",
            )
        return int(value)

    def rope(self, positions: int, width: int) -> dict[str, Any]:
        """Return the parameters of rotary tables."""
        found: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self._file.metadata.get(f"{self._prefix}rope.scaling.type", "none")
        factors = self._rotary_factors(width)
        if factors and kind == "none":  # the only kind of transformers that takes any factors
            found |= {"short_factor": factors, "long_factor": factors}
            found |= {"factor": 1.0, "attention_factor": 1.0}
            found["original_max_position_embeddings"] = positions
            return {"rope_type": "longrope", **found}
        if kind == "none":
            return {"rope_type": "default", **found}
        if kind not in ("linear", "yarn") or factors:
            self.refuse("rope.scaling.type", "none" if factors else "none, linear or yarn")
        found |= {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            original = self.count("rope.scaling.original_context_length", positions)
            found["original_max_position_embeddings"] = original
        return found

    def _rotary_factors(self, width: int) -> list[float]:
        """Return the numbers that divide the frequencies of rotary tables; empty if none do."""
        tensor = self._file.tensors.get(_ROTARY_FACTORS)
        if tensor is None:
            return []
        if tensor.kind != GgufKind.F32 or tensor.shape != (width // 2,):
            raise CheckpointError(
                f"The tensor {_ROTARY_FACTORS} is not valid",
                where=str(tensor.path),
                got=f"{tensor.kind.name} of shape {list(tensor.shape)}",
                expected=f"F32 of shape [{width // 2}], half of the width of a head",
            )
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            found = list(struct.unpack(f"<{width // 2}f", file.read(tensor.size)))
        if not all(math.isfinite(one) and one > 0 for one in found):
            raise CheckpointError(
                f"The tensor {_ROTARY_FACTORS} is not valid",
                where=str(tensor.path),
                got=shortened(str(found)),
                expected="positive numbers",
            )
        return found

    def refuse(self, word: str, expected: str) -> None:
        """Raise for a property with another value."""
        key = self._prefix + word
        raise CheckpointError(
            "The metadata of a GGUF file is not valid",
            where=str(self._file.path),
            got=f"{key}={shortened(repr(self._file.metadata.get(key)))}",
            expected=expected,
        )
