"""GGUF files of models with linear attention, as llama.cpp's scripts write them."""

from __future__ import annotations

from typing import Any

import gguf
import torch


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the properties of linear attention, and of the rotation of a part of a head."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    rope = config.rope_parameters
    writer.add_full_attention_interval(1 + config.layer_types.index("full_attention"))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config.linear_value_head_dim * values)
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def fused_rows(config: Any) -> dict[str, torch.Tensor]:
    """Return the rows of channels and of gates in the fused projection of Qwen3-Next."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = torch.arange(keys * 2 * (width + values)).view(keys, -1)
    queries, key, value, gates = heads.split([width, width, values, values], 1)
    channels = torch.cat([part.flatten() for part in (queries, key, value)])
    return {"qkv": channels, "z": gates.flatten()}


def stored(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is in a file."""
    tiled = _tiled(config, name, tensor, config.linear_num_key_heads)
    if name.endswith("ssm_a"):
        return -tiled.exp()
    if "conv1d" in name:
        return tiled.squeeze(1)
    return tiled + 1 if _is_centred(name) else tiled


def restored(config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is in transformers."""
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    tiled = _tiled(config, name, values, per_key)
    if name.endswith("ssm_a"):
        return tiled.double().neg().log().float()
    return tiled - 1 if _is_centred(name) else tiled


def _is_centred(name: str) -> bool:
    return name.endswith("norm.weight") and "ssm_norm" not in name


def _tiled(config: Any, name: str, tensor: torch.Tensor, outer: int) -> torch.Tensor:
    """Return a tensor with its value heads, `[outer, inner]`, as `[inner, outer]`."""
    if config.model_type == "qwen3_next":
        return tensor
    part = name.split(".")[2] if name.startswith("blk.") else ""
    values = config.linear_num_value_heads
    if part == "ssm_out":
        return _exchanged(tensor.T, outer, values).T.contiguous()
    if part in ("attn_qkv", "ssm_conv1d"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return torch.cat((tensor[:first], _exchanged(tensor[first:], outer, values)))
    if part in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        return _exchanged(tensor, outer, values)
    return tensor


def _exchanged(rows: torch.Tensor, outer: int, heads: int) -> torch.Tensor:
    grouped = rows.reshape(outer, heads // outer, -1, *rows.shape[1:])
    return grouped.transpose(0, 1).reshape(rows.shape).contiguous()
