"""Checkpoints of GPTQ and AWQ, packed by the formulas of their formats, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.expert_models import restacked, unstacked
from tpcompile.presets import preset

SMALL = {"vocab_size": 101, "num_hidden_layers": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Integers:
    """The integers, zeros and scales of a weight, from which its values follow."""

    values: torch.Tensor
    """[rows, columns], without a sign."""
    zeros: torch.Tensor
    """[rows, groups]"""
    scales: torch.Tensor
    """[rows, groups], in float16."""

    @property
    def weight(self) -> torch.Tensor:
        group_columns = self.values.shape[1] // self.zeros.shape[1]
        zeros, scales = (
            tensor.float().repeat_interleave(group_columns, 1)
            for tensor in (self.zeros, self.scales)
        )
        return (self.values.float() - zeros) * scales


def drawn(shape: tuple[int, int], bits: int, columns: int, zeros: range) -> Integers:
    """Return random integers; neighbouring groups have other zeros and scales."""
    rows, groups = shape[0], shape[1] // (columns or shape[1])
    offsets = torch.randint(zeros.start, zeros.stop, (rows, groups))
    scales = (0.5 + torch.rand(rows, groups)) * 0.1 / 2**bits
    return Integers(torch.randint(0, 1 << bits, shape), offsets, scales.half())


def words(integers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack neighbours along the last dimension into int32 words."""
    per_word = 32 // bits
    packed = torch.zeros(*integers.shape[:-1], integers.shape[-1] // per_word, dtype=torch.int64)
    for place, neighbour in enumerate(order or range(per_word)):
        packed |= integers[..., neighbour::per_word].long() << bits * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def gptq(integers: Integers, bits: int, version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear: `qweight` has words of columns, `qzeros` of rows."""
    columns = integers.values.shape[1]
    less = 1 if version == 1 else 0
    return {
        "qweight": words(integers.values, bits).T,
        "qzeros": words((integers.zeros - less).T, bits),
        "scales": integers.scales.T,
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // integers.zeros.shape[1]),
    }


def awq(integers: Integers) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear, which have words of rows."""
    return {
        "qweight": words(integers.values.T, 4, AWQ_ORDER),
        "qzeros": words(integers.zeros.T, 4, AWQ_ORDER),
        "scales": integers.scales.T,
    }


def write_gptq(
    directory: Path,
    *,
    bits: int = 4,
    columns: int = 32,
    symmetric: bool = False,
    version: int = 1,
    zero_biases: bool = False,
    **changes: Any,
) -> Any:
    """Write a checkpoint of GPTQ; return a model in fp32 with its values."""
    zeros = range(1, (1 << bits) + 1 - (bits == 8)) if version == 1 else range(1 << bits)
    middle = 1 << bits - 1

    def stored(linear: nn.Linear) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        shape = (linear.out_features, linear.in_features)
        integers = drawn(shape, bits, columns, range(middle, middle + 1) if symmetric else zeros)
        tensors = gptq(integers, bits, version)
        if zero_biases and linear.bias is None:
            tensors["bias"] = torch.zeros(linear.out_features, dtype=torch.float16)
        return integers.weight, tensors

    scheme = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": columns or -1,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return _write(directory, scheme, stored, **changes)


def write_awq(
    directory: Path, *, columns: int = 32, left: tuple[str, ...] = (), **changes: Any
) -> Any:
    """Write a checkpoint of AWQ; return a model in fp32 with its values."""

    def stored(linear: nn.Linear) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        integers = drawn((linear.out_features, linear.in_features), 4, columns, range(16))
        return integers.weight, awq(integers)

    scheme = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": columns or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(left) or None,
    }
    return _write(directory, scheme, stored, left, **changes)


def _write(
    directory: Path,
    scheme: Mapping[str, Any],
    stored: Any,
    left: tuple[str, ...] = (),
    name: str = "tiny-qwen3",
    **changes: Any,
) -> Any:
    torch.manual_seed(sum(map(ord, f"{name}{scheme}")))
    config = AutoConfig.for_model(**{**preset(name), **SMALL, **changes})
    make: Any = AutoModelForCausalLM.from_config
    model = unstacked(make(config, dtype=torch.float16).eval())
    truth = unstacked(make(config, dtype=torch.float32).eval())
    saved: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter).mul_(0.1))
        truth.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
        for path, linear in model.named_modules():
            skipped = path == "lm_head" or path.endswith(left or ("lm_head",))
            if isinstance(linear, nn.Linear) and not skipped:
                weight, tensors = stored(linear)
                truth.get_submodule(path).weight.copy_(weight)
                saved |= {f"{path}.{key}": value.contiguous() for key, value in tensors.items()}
                saved[f"{path}.weight"] = torch.empty(0)
    for key, value in model.state_dict().items():
        saved.setdefault(key, value.contiguous())
    if config.tie_word_embeddings:
        del saved["lm_head.weight"]
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.float16
    config.save_pretrained(directory)
    save_file(
        {key: value for key, value in saved.items() if value.numel()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    file = directory / "config.json"
    text = {**json.loads(file.read_text()), "quantization_config": dict(scheme)}
    file.write_text(json.dumps(text))
    return restacked(truth)
