"""Configurations of the models in GGUF files."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tpcompile.errors import CheckpointError
from tpcompile.frontend.stored.gguf import METHOD
from tpcompile.gguf import open_gguf
from tpcompile.gguf.kinds import PLAIN
from tpcompile.gguf.models import EMBEDDING, LEFT_OUT, configuration, tensors_of

log = logging.getLogger(__name__)

_DEFAULT_DTYPE = torch.bfloat16
"""The dtype of models whose embedding is quantized; other models have the embedding's dtype."""


def gguf_config(path: str) -> Any:
    """Return the configuration of the model in a GGUF file.

    `quantization_config` has the kinds of the weights that are not stored as values.
    """
    from transformers import AutoConfig

    file = open_gguf(path)
    values = configuration(file)
    tensors = tensors_of(file)
    quantized = {
        name: tensor.kind.name for name, tensor in tensors.items() if tensor.kind not in PLAIN
    }
    left_out = sum(name.startswith(LEFT_OUT) for name in tensors)
    if left_out:
        log.info("%d tensors that predict further tokens are not read", left_out)
    model_type = values.pop("model_type")
    dtype = PLAIN.get(tensors[EMBEDDING].kind, _DEFAULT_DTYPE)
    try:
        config = AutoConfig.for_model(model_type, **values, dtype=dtype)
    except Exception as error:  # configurations raise different errors
        raise CheckpointError(
            "The metadata of a GGUF file is not a valid configuration",
            where=path,
            got=str(error).split("\n")[0],
        ) from error
    if quantized:
        config.quantization_config = {"quant_method": METHOD, "kinds": quantized}
    return config
