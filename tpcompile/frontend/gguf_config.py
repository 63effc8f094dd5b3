"""Configurations of the models in GGUF files."""

from __future__ import annotations

from typing import Any

from tpcompile.errors import CheckpointError
from tpcompile.frontend.stored.gguf import METHOD
from tpcompile.gguf import GgufFile, open_gguf
from tpcompile.gguf.models import EMBEDDING, HEAD, PLAIN, configuration, tensors_of

_DEFAULT_DTYPE = "bfloat16"
"""The dtype of models whose weights have few bits."""


def gguf_config(path: str) -> Any:
    """Return the configuration of the model in a GGUF file.

    `quantization_config` has the kinds of the weights that are not stored as values. A tied head in
    such a kind is untied, because the embedding is read as values.
    """
    from transformers import AutoConfig

    file = open_gguf(path)
    values = configuration(file)
    kinds = {name: one.kind for name, one in tensors_of(file).items()}
    kinds.setdefault(HEAD, kinds[EMBEDDING])
    quantized = {name: kind.name for name, kind in kinds.items() if kind not in PLAIN}
    model_type = values.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **values, dtype=_dtype(file))
    except Exception as error:  # configurations raise different errors
        raise CheckpointError(
            "The metadata of a GGUF file is no valid configuration",
            where=path,
            got=str(error).split("\n")[0],
        ) from error
    if quantized:
        config.quantization_config = {"quant_method": METHOD, "kinds": quantized}
    return config


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the model: that of its embedding, if it is stored as values."""
    kind = tensors_of(file)[EMBEDDING].kind
    if kind not in PLAIN:
        return _DEFAULT_DTYPE
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind.name]
