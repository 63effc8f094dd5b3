"""The architectures of GGUF files: their names in transformers, and what llama.cpp converts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tpcompile.errors import CheckpointError
from tpcompile.gguf import experts, linear_attention
from tpcompile.gguf.conversions import CENTRED, LOGARITHM, Order
from tpcompile.gguf.file import GgufTensor
from tpcompile.gguf.linear_attention import (
    decay,
    of_value_heads,
    taps,
    taps_as_stored,
    transformed,
    with_gates,
)
from tpcompile.gguf.metadata import HEADS, KV_HEADS, PREDICTED, ROTATED, Metadata

Conversion = Callable[[Metadata, str, GgufTensor], GgufTensor]
"""A function of the metadata, a name and a tensor that returns the tensor as it must be read."""


def _names(stems: Mapping[str, str]) -> dict[str, str]:
    """Return the names of weights and biases."""
    ends = ("weight", "bias")
    return {f"{stem}.{end}": f"{name}.{end}" for stem, name in stems.items() for end in ends}


_SIDES = ("gate", "up", "down")
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
_DENSE = _names({f"ffn_{side}": f"mlp.{side}_proj" for side in _SIDES})
_EXPERTS = _names({"ffn_gate_inp": "mlp.gate"})
_SHARED = _names(
    {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{side}_shexp": f"mlp.shared_expert.{side}_proj" for side in _SIDES},
    }
)
_LAYER = _names({**_ATTENTION, "ffn_norm": "post_attention_layernorm"})
_HYBRID_LAYER = {
    **_names(
        {
            **_ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        }
    ),
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}


def _whole_heads(metadata: Metadata, width: int) -> dict[str, Any]:
    """Return no parameters of rotary tables; refuse rotation of a part of a head."""
    if metadata.count(ROTATED, width) != width:
        metadata.refuse(ROTATED, f"the width of a head, {width}")
    return {}


def _no_more(metadata: Metadata) -> dict[str, Any]:
    return {}


def _in_pairs(metadata: Metadata, name: str, tensor: GgufTensor, heads: str) -> GgufTensor:
    """Return a tensor with the order of its rows.

    llama.cpp rotates neighbours of a head, and transformers its halves.
    """
    count, rows = metadata.count(heads), tensor.shape[0]
    if rows % (2 * count):
        raise CheckpointError(
            f"The tensor {name} must have an even number of rows per head",
            where=str(tensor.path),
            got=f"{rows} rows",
            expected=f"a multiple of {2 * count}",
        )
    return replace(tensor, order=Order(0, count, rows // count // 2, 2))


@dataclass(frozen=True)
class Architecture:
    """The conversion of an architecture's metadata and tensors to those of transformers."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: {**_LAYER, **_DENSE})
    """The names of a layer's tensors, by their names in the file; empty if another tensor has the
    rows."""
    heads_have_widths: bool = False
    """Whether heads have a width of their own, `head_dim`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further properties of the configuration."""
    told_by: Mapping[str, str] = field(default_factory=dict)
    """Properties of the configuration that follow from the presence of a tensor."""
    properties: Callable[[Metadata], dict[str, Any]] = _no_more
    """Further properties, computed from the metadata."""
    rotation: Callable[[Metadata, int], dict[str, Any]] = _whole_heads
    """The further parameters of rotary tables, given the width of a head."""
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    """The conversions of tensors, by the first parts of their names."""
    has_experts: bool = False
    """Whether layers may have stacks of experts."""
    has_dense: bool = True
    """Whether the configuration has the width of MLPs without experts."""
    rotary_factors: bool = False
    """Whether a file may have factors of rotary tables."""
    words: tuple[str, ...] = ()
    """The properties that are read of this architecture only."""


def _hybrid_experts(metadata: Metadata) -> dict[str, Any]:
    """Return the properties of linear attention and of experts."""
    return {**linear_attention.properties(metadata), **experts.with_shared(metadata)}


_CENTRED_NORMS: dict[str, Conversion] = dict.fromkeys(
    ("output_norm", "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm"),
    partial(transformed, transform=CENTRED),
)
_GATE: dict[str, Conversion] = {"ffn_gate_inp_shexp": experts.one_row}
_QWEN35 = Architecture(
    "qwen3_5_text",
    names={**_HYBRID_LAYER, **_DENSE},
    heads_have_widths=True,
    more={"attention_bias": False},
    properties=linear_attention.properties,
    rotation=linear_attention.rotation_in_sections,
    conversions={
        **_CENTRED_NORMS,
        "attn_qkv": partial(of_value_heads, after_keys=True),
        "attn_gate": of_value_heads,
        "ssm_beta": of_value_heads,
        "ssm_alpha": of_value_heads,
        "ssm_dt": of_value_heads,
        "ssm_out": partial(of_value_heads, axis=-1),
        "ssm_conv1d": taps,
        "ssm_a": decay,
    },
    words=(*linear_attention.SECTIONED_WORDS, PREDICTED),
)
_QWEN35MOE = replace(
    _QWEN35,
    model_type="qwen3_5_moe_text",
    names={**_HYBRID_LAYER, **_EXPERTS, **_SHARED},
    properties=_hybrid_experts,
    conversions={**_QWEN35.conversions, **_GATE},
    has_experts=True,
    has_dense=False,
    words=(*_QWEN35.words, *experts.SHARED_WORDS),
)
ARCHITECTURES = {
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", heads_have_widths=True, more={"attention_bias": False}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        names={**_LAYER, **_EXPERTS, **_SHARED},
        more={"norm_topk_prob": False},
        told_by={"qkv_bias": "model.layers.0.self_attn.q_proj.bias"},
        properties=experts.with_shared,
        conversions=_GATE,
        has_experts=True,
        words=experts.SHARED_WORDS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        names={**_LAYER, **_DENSE, **_EXPERTS},
        heads_have_widths=True,
        more={"attention_bias": False, "norm_topk_prob": True},
        properties=experts.properties,
        has_experts=True,
        words=experts.WORDS,
    ),
    "llama": Architecture(
        "llama",
        heads_have_widths=True,
        told_by={
            "attention_bias": "model.layers.0.self_attn.q_proj.bias",
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias",
        },
        conversions={
            "attn_q": partial(_in_pairs, heads=HEADS),
            "attn_k": partial(_in_pairs, heads=KV_HEADS),
        },
        rotary_factors=True,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35MOE,
    "qwen3next": replace(
        _QWEN35MOE,
        model_type="qwen3_next",
        names={
            **_QWEN35MOE.names,
            "attn_qkv.weight": "linear_attn.in_proj_qkvz.weight",
            "attn_gate.weight": "",
            "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
        },
        more={"attention_bias": False, "norm_topk_prob": True},
        rotation=linear_attention.rotation,
        conversions={
            **_CENTRED_NORMS,
            **_GATE,
            "attn_qkv": with_gates,
            "ssm_conv1d": taps_as_stored,
            "ssm_a": partial(transformed, transform=LOGARITHM),
        },
        has_dense=True,
        words=(*linear_attention.WORDS, PREDICTED, *experts.SHARED_WORDS),
    ),
}
