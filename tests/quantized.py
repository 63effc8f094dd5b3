"""Checkpoints in the layout `int-quantized` of compressed-tensors, and the model they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tpcompile.presets import preset


def quantised(weight: torch.Tensor, columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int8 values of a matrix and the scales of groups of columns, or of rows."""
    groups = weight.unflatten(1, (-1, columns or weight.shape[1]))
    scales = groups.abs().amax(-1).div(127).clamp_min(1e-8)
    values = (groups / scales.unsqueeze(-1)).round().clamp(-127, 127)
    return values.flatten(1).to(torch.int8), scales


def write_quantised(
    directory: Path,
    name: str = "tiny-qwen3",
    columns: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    ignore: tuple[str, ...] = ("lm_head",),
    **changes: Any,
) -> Any:
    """Write a checkpoint with random weights; return a model with the values that it stands for.

    `changes` are those of the configuration. `columns` is the size of a group, 0 for whole rows.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**preset(name), **changes})
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=dtype).eval()
    stored = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).mul_(0.1))
        for path, linear in model.named_modules():
            if isinstance(linear, nn.Linear) and path not in ignore:
                values, scales = quantised(linear.weight.float(), columns)
                scales = scales.to(dtype)
                stored |= {f"{path}.weight": values, f"{path}.weight_scale": scales}
                value_scales = scales.float().repeat_interleave(columns or values.shape[1], 1)
                linear.weight.copy_(values.float() * value_scales)
    tied = config.tie_word_embeddings
    for path, parameter in model.named_parameters():
        if not (tied and path == "lm_head.weight"):
            stored.setdefault(path, parameter.detach().contiguous())
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype
    config.save_pretrained(directory)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    text = json.loads(file.read_text())
    text["quantization_config"] = scheme(columns, ignore)
    file.write_text(json.dumps(text))
    return model


def scheme(columns: int, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint."""
    quantization = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if columns else "channel",
        "group_size": columns or None,
        **weights,
    }
    group = {"targets": ["Linear"], "weights": quantization, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def rewritten(directory: Path, destination: Path, **tensors: torch.Tensor | None) -> Path:
    """Copy a checkpoint with other tensors, or without those that are None."""
    destination.mkdir()
    stored: dict[str, Any] = {**load_file(directory / "model.safetensors"), **tensors}
    present = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(present, destination / "model.safetensors", {"format": "pt"})
    (destination / "config.json").write_text((directory / "config.json").read_text())
    return destination
