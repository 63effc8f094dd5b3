"""Models in GGUF files: the names of their tensors and their configuration, as in transformers."""

from __future__ import annotations

import re
from typing import Any

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf.architectures import ARCHITECTURES, Architecture
from tpcompile.gguf.experts import STACKS, experts_of
from tpcompile.gguf.file import GgufFile, GgufTensor
from tpcompile.gguf.metadata import (
    BLOCKS,
    FEATURES,
    HEADS,
    KV_HEADS,
    ROTARY_FACTORS,
    ROTATED,
    Metadata,
)
from tpcompile.json_files import shortened

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LEFT_OUT = "mtp."
"""The start of the names of tensors that predict further tokens, which transformers ignores."""

_OUTER = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")
_COUNTS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": HEADS,
}
_READ = frozenset(
    (
        *_COUNTS.values(),
        *(BLOCKS, FEATURES, KV_HEADS, "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
        ROTATED,
    )
)
"""The supported properties of all architectures. Others may change numbers, and are refused."""


def tensors_of(file: GgufFile) -> dict[str, GgufTensor]:
    """Return the tensors by the names that the model has in transformers."""
    known, metadata = _architecture(file)
    left_out = range(metadata.layers(), metadata.count(BLOCKS))
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        block = _BLOCK.fullmatch(name)
        if block is not None and int(block[1]) in left_out:
            tensors[LEFT_OUT + name] = tensor
        elif block is not None and block[2] in known.names:
            new_name = known.names[block[2]]
            if new_name:
                new_name = f"model.layers.{int(block[1])}.{new_name}"
                tensors[new_name] = _converted(known, metadata, name, block[2], tensor)
        elif block is not None and block[2] in STACKS and known.has_experts:
            path = f"model.layers.{int(block[1])}.mlp.experts"
            for new_name, weight in experts_of(block[2], name, tensor):
                tensors[f"{path}.{new_name}"] = weight
        elif name in _OUTER:
            tensors[_OUTER[name]] = _converted(known, metadata, name, name, tensor)
        elif name != ROTARY_FACTORS or not known.rotary_factors:
            raise CheckpointError(
                f"The file holds a tensor that the model does not have: {shortened(name)}",
                where=str(tensor.path),
                expected="only the tensors of the model",
            )
    return tensors


def _converted(
    known: Architecture, metadata: Metadata, name: str, local: str, tensor: GgufTensor
) -> GgufTensor:
    """Return a tensor as it must be read; `local` is its name without the block."""
    convert = known.conversions.get(local.partition(".")[0])
    return tensor if convert is None else convert(metadata, name, tensor)


def _architecture(file: GgufFile) -> tuple[Architecture, Metadata]:
    """Return the architecture of a file, and its metadata."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            "tpcompile does not read GGUF files of this architecture",
            where=str(file.path),
            got=shortened(repr(name)),
            expected=" or ".join(ARCHITECTURES),
            hint="Use a checkpoint of Hugging Face",
        )
    return ARCHITECTURES[name], Metadata(file, name)


def configuration(file: GgufFile) -> dict[str, Any]:
    """Return the configuration that a file describes, `model_type` included."""
    known, metadata = _architecture(file)
    metadata.refuse_others({*_READ, *known.words})
    tensors = tensors_of(file)
    if EMBEDDING not in tensors:
        raise CheckpointError("The file lacks the tensor token_embd.weight", where=str(file.path))
    rows = tensors[EMBEDDING].shape[0]
    if metadata.count("vocab_size", rows) != rows:
        metadata.refuse("vocab_size", f"{rows}, the rows of the embedding")
    if metadata.count(BLOCKS) > len(tensors):
        metadata.refuse(BLOCKS, f"at most one for each of {len(tensors)} tensors")
    config: dict[str, Any] = {key: metadata.count(word) for key, word in _COUNTS.items()}
    config |= {
        "model_type": known.model_type,
        **({"intermediate_size": metadata.count(FEATURES)} if known.has_dense else {}),
        "num_hidden_layers": metadata.layers(),
        "num_key_value_heads": metadata.count(KV_HEADS),
        "vocab_size": rows,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in tensors,
        **known.more,
        **known.properties(metadata),
        **{key: tensor in tensors for key, tensor in known.told_by.items()},
    }
    width = _width_of_heads(metadata, known)
    rope = metadata.rope(config["max_position_embeddings"], width)
    config["rope_parameters"] = rope | known.rotation(metadata, width)
    if known.heads_have_widths:
        config["head_dim"] = width
    ends = metadata.ends(rows)
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    config["bos_token_id"] = metadata.token("bos", rows)
    return config


def _width_of_heads(metadata: Metadata, known: Architecture) -> int:
    heads, hidden = metadata.count(HEADS), metadata.count("embedding_length")
    width = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("attention.value_length", width) != width:
        metadata.refuse("attention.value_length", f"the key_length {width}")
    if not known.heads_have_widths and width * heads != hidden:
        metadata.refuse(
            "attention.key_length", f"{hidden // heads}, as {heads} heads are {hidden} wide"
        )
    return width
