"""The dtypes in which the files of a checkpoint store the scales of quantized weights."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tpcompile.checkpoint_files import files_of, text_names
from tpcompile.gguf import is_gguf
from tpcompile.hub import cached_directory
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import FLOATS

_ENDS = (".weight_scale", ".weight_scale_inv", ".scales")
_DTYPES = {DType(stored.kind).name: DType(stored.kind).torch for stored in FLOATS}
"""The dtypes of scales in formats, by the names of safetensors."""


def scale_dtypes(model: Any, config: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of the scales in the files of MODEL, by the names of their tensors.

    The result is empty if MODEL has no files here, or is not quantized. Scales in other dtypes are
    left out; reading them is an error.
    """
    if getattr(config, "quantization_config", None) is None or not isinstance(model, str | Path):
        return {}
    if is_gguf(model):  # the kinds of its weights say the dtypes
        return {}
    directory = Path(model) if Path(model).is_dir() else cached_directory(str(model))
    if directory is None or not any(directory.glob("*.safetensors")):
        return {}
    files = files_of(directory, getattr(config, "transformers_weights", None))
    names = defaultdict(list)
    for name, stored in text_names(files).items():
        if name.endswith(_ENDS):
            names[files[stored]].append((name, stored))
    dtype_names: dict[str, str] = {}
    for path, scales in names.items():
        with safe_open(path, framework="pt") as file:
            dtype_names |= {name: file.get_slice(stored).get_dtype() for name, stored in scales}
    return {name: _DTYPES[dtype] for name, dtype in dtype_names.items() if dtype in _DTYPES}
