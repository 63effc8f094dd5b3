"""Checkpoints in 8-bit floating point, and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.expert_models import restacked, unstacked
from tpcompile.presets import preset

SMALL = {"vocab_size": 101, "num_hidden_layers": 2}
LARGEST = 448.0
BLOCK = (128, 128)


def in_blocks(
    weight: torch.Tensor, block: tuple[int, int] | None, scales: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers and scales of a weight, and the values that they stand for.

    Neighbouring blocks have other scales. Without a block, the weight has one scale.
    """
    rows, columns = block or weight.shape
    wide = (
        nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        .unflatten(1, (-1, columns))
        .unflatten(0, (-1, rows))
    )
    most = wide.abs().amax((1, 3)).clamp_min(1e-6)
    steps = torch.arange(most.shape[0])[:, None] + torch.arange(most.shape[1])
    stored = (most / LARGEST * (1 + steps % 3)).to(scales)
    factors = stored.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    factors = factors[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / factors).to(torch.float8_e4m3fn)
    return numbers, stored if block else stored.reshape(()), numbers.float() * factors


def write_fp8(
    directory: Path,
    *,
    name: str = "tiny-qwen3",
    block: tuple[int, int] | None = BLOCK,
    scales: torch.dtype = torch.float32,
    left: tuple[str, ...] | None = None,
    **changes: Any,
) -> Any:
    """Write a checkpoint of block FP8; return a model in fp32 with its values.

    `left` are the linears that stay in bf16; by default that is the head.
    """
    torch.manual_seed(sum(map(ord, f"{name}{block}{changes}")))
    config = AutoConfig.for_model(**{**preset(name), **SMALL, **changes})
    make: Any = AutoModelForCausalLM.from_config
    truth = unstacked(make(config, dtype=torch.float32).eval())
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in truth.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).mul_(0.1))
            parameter.copy_(parameter.bfloat16())
        for path, linear in truth.named_modules():
            if isinstance(linear, nn.Linear) and not path.endswith(left or ("lm_head",)):
                numbers, block_scales, values = in_blocks(linear.weight, block, scales)
                linear.weight.copy_(values)
                stored |= {f"{path}.weight": numbers, f"{path}.weight_scale_inv": block_scales}
    for key, value in truth.state_dict().items():
        stored.setdefault(key, value.bfloat16().contiguous())
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    scheme = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(block) if block else None,
    }
    if left is not None:
        scheme["modules_to_not_convert"] = list(left)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": scheme}))
    return restacked(truth)
