"""Checkpoints that the library compressed-tensors writes, and the model that it reads from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.expert_models import restacked, unstacked
from tpcompile.presets import preset

SMALL = {"vocab_size": 101, "num_hidden_layers": 2}


def group(
    bits: int = 4,
    columns: int = 0,
    *,
    symmetric: bool = True,
    layout: str | None = "pack-quantized",
    targets: Sequence[str] = ("Linear",),
    **more: Any,
) -> dict[str, Any]:
    """Return a group of a scheme; `columns` is the size of a group, 0 for whole rows."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "strategy": "group" if columns else "channel",
        "group_size": columns or None,
    }
    return {"targets": list(targets), "weights": weights, "format": layout, **more}


def floats(strategy: str, block: Sequence[int] | None = None) -> dict[str, Any]:
    """Return a group of a scheme of 8-bit floating point."""
    common = {"num_bits": 8, "type": "float", "strategy": strategy}
    weights = {**common, "symmetric": True, "dynamic": False, "block_structure": block}
    inputs = {**common, "strategy": "token", "dynamic": True}
    base = group(layout="float-quantized")
    return {**base, "weights": weights, "input_activations": inputs}


def write_compressed(
    directory: Path,
    *groups: Mapping[str, Any],
    name: str = "tiny-qwen3",
    dtype: torch.dtype = torch.float32,
    ignore: Sequence[str] = ("lm_head",),
    **changes: Any,
) -> Any:
    """Write a checkpoint with random weights; return a model in fp32 with the values that it has.

    `changes` are those of the configuration.
    """
    torch.manual_seed(len(groups) + sum(map(ord, name)))
    config = AutoConfig.for_model(**{**preset(name), **SMALL, **changes})
    make: Any = AutoModelForCausalLM.from_config
    model = unstacked(make(config, dtype=dtype).eval())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).mul_(0.1))
    truth = copy.deepcopy(model).float()
    named = {f"group_{number}": copy.deepcopy(dict(scheme)) for number, scheme in enumerate(groups)}
    apply_quantization_config(model, QuantizationConfig(config_groups=named, ignore=list(ignore)))
    compressor = ModelCompressor.from_pretrained_model(model)
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and hasattr(linear, "quantization_scheme"):
            _compress(linear, truth.get_submodule(path))
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype
    config.save_pretrained(directory)
    compressor.update_config(str(directory))
    stored = {key: value.contiguous() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return restacked(truth)


def _compress(linear: nn.Linear, truth: nn.Linear) -> None:
    """Compress a linear, and put the values that the library reads back into another one."""
    scheme: Any = linear.quantization_scheme
    args = scheme.weights
    whole = linear.weight.detach()
    rows, columns = {
        "tensor": whole.shape,
        "block": args.block_structure,
        "group": (1, args.group_size),
        "channel": (1, whole.shape[1]),
    }[str(args.strategy)]
    # Neighbouring groups differ by more than rounding, in their scales and in their offsets.
    groups = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    steps = (
        torch.arange(groups.shape[0])[:, None, None, None] + torch.arange(groups.shape[2])[:, None]
    )
    groups.mul_(1 + steps % 3).add_(0.01 * (steps % 5 - 2))
    scale, offset = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), args)
    linear.weight_scale.data.copy_(scale.view_as(linear.weight_scale))
    if not args.symmetric:
        linear.weight_zero_point.data.copy_(offset)
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    compressor.compress_module(linear)
    stored = dict(linear.state_dict())
    stored["weight_scale"] = stored["weight_scale"].float()
    truth.weight.data.copy_(compressor.decompress(stored, scheme)["weight"])
