"""The models whose decode steps are tested: small presets, and models with rare features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import fx
from transformers import AutoConfig

from benchmarks.mutations.subjects import in_few_bits
from tests.captures import captured_once
from tests.models import Pair, few_bits_pair, pair_of, preset_pair
from tests.runtime.eager_pair import enlivened
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.fuse_delta import FuseDelta
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.presets import preset
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.manager import Pass
from tpcompile.rewriting.rewrite import Report, fuse_at
from tpcompile.rewriting.structure import delta_blocks
from tpcompile.runtime.weights import ModelWeights

EVEN = "even"
"""A model that 8 ranks split evenly (heads, widths, vocabulary), with biases and per-head norms."""
BIASED = "biased"
"""A model with a bias in all linears except the head."""
APART = "apart"
"""The same model, with a weight each for queries, keys, values, gate and up."""
DELTA_APART = "delta-apart"
"""`tiny-qwen3.5`, with a weight each for the channels of linear attention and for their gates."""
WINDOWED = "windowed"
"""A model whose second layer attends to a window of five tokens."""
WIDE_HEADS = "wide-heads"
"""A model with one layer, whose heads fill several vectors and half of one more."""
GELU, GELU_TANH, RELU, RELU2 = "gelu", "gelu-tanh", "relu", "relu2"
"""Models with this activation, of which that of `RELU2` has no gate. Their linears have a bias, and
weights are spread out, so that activations give different logits."""
INT4, INT4_WIDE, INT8 = "int4:32:offsets", "int4:48", "int8:row"
"""Models with weights of few bits, except in the embedding and in the head that is tied to it. Two
ranks cut groups of 32 columns, and three those of 48. That with int8 has a head of its own."""
INT4_EXPERTS = "experts in int4"
"""The model `EXPERTS` with weights of four bits. Two ranks hold whole groups of 32 columns of the
experts' results, and five cut them."""
_FEW_BITS = (INT4, INT4_WIDE, INT8, INT4_EXPERTS)
FEW_TOKENS = "few-tokens"
"""`tiny-qwen3` with a smaller vocabulary, for executors that take seconds per step."""
ONE_LAYER = "one-layer"
"""The same with one layer, for tests of tiles, which are the same in every layer."""
HYBRID = "hybrid"
"""`tiny-qwen3.5` with one layer of each kind and a smaller vocabulary. Two value heads read each of
its three key heads, its convolution has four taps, and a quarter of a head is rotated."""
HYBRID_ODD = "hybrid-odd"
"""The same with three taps, and heads whose widths are no powers of two."""
HYBRID_SHORT = "hybrid-short"
"""The same with two taps, as many value heads as key heads, and heads that are rotated whole."""
EXPERTS = "experts"
"""A model of Qwen3-MoE: an MLP in its first layer, and in its second one six experts, of which a
token chooses two."""
WHOLE = "whole experts"
"""The same, of which ranks hold whole experts."""
SHARED = "shared expert"
"""A model of Qwen2-MoE, which has an expert for all tokens beside seven of which they choose three.
Scores do not add up to 1."""
HYBRID_EXPERTS = "hybrid-experts"
"""A model of Qwen3.5-MoE, with linear attention, attention with gates, and a shared expert."""
ONE_OF_TWO, EIGHT_OF_MANY = "one of two experts", "eight of 16 experts"
"""Models with one layer, of Qwen3-MoE and of Qwen2-MoE with a shared expert."""
_HYBRID = {
    **preset("tiny-qwen3.5"),
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vocab_size": 199,
}
_EXPERTS = {
    **preset("tiny-qwen3"),
    "model_type": "qwen3_moe",
    "vocab_size": 199,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
_SHARED = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_QWEN2_MOE = {
    **preset("tiny-qwen2"),
    "model_type": "qwen2_moe",
    "vocab_size": 199,
    "norm_topk_prob": False,
    **_SHARED,
}
_CUT = {**preset("tiny-qwen3"), "intermediate_size": 192, "vocab_size": 199}
OWN = {
    FEW_TOKENS: {**preset("tiny-qwen3"), "vocab_size": 199},
    ONE_LAYER: {**preset("tiny-qwen3"), "vocab_size": 199, "num_hidden_layers": 1},
    EVEN: {
        **preset("tiny-qwen3"),
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1024,
        "attention_bias": True,
    },
    **{
        name: {
            **preset("tiny-qwen3"),
            "model_type": "llama",
            "hidden_size": 96,
            "vocab_size": 199,
            "attention_bias": True,
            "mlp_bias": True,
        }
        for name in (BIASED, APART)
    },
    **{
        name: {
            **preset("tiny-qwen2"),
            "model_type": kind,
            "vocab_size": 199,
            "hidden_size": 48,
            "intermediate_size": 80,
            "hidden_act": activation,
            "mlp_bias": True,
        }
        for name, kind, activation in (
            (GELU, "llama", "gelu"),
            (GELU_TANH, "llama", "gelu_pytorch_tanh"),
            (RELU, "llama", "relu"),
            (RELU2, "arcee", "relu2"),
        )
    },
    DELTA_APART: preset("tiny-qwen3.5"),
    WINDOWED: {
        **preset("tiny-qwen2"),
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "vocab_size": 199,
    },
    WIDE_HEADS: {
        **preset("tiny-qwen3"),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 104,
        "num_hidden_layers": 1,
        "vocab_size": 199,
    },
    HYBRID: _HYBRID,
    HYBRID_ODD: {
        **_HYBRID,
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": {**_HYBRID["rope_parameters"], "partial_rotary_factor": 0.5},
    },
    HYBRID_SHORT: {
        **_HYBRID,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 3,
        "rope_parameters": {**_HYBRID["rope_parameters"], "partial_rotary_factor": 1.0},
    },
    EXPERTS: _EXPERTS,
    WHOLE: _EXPERTS,
    SHARED: _QWEN2_MOE,
    ONE_OF_TWO: {
        **_EXPERTS,
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    EIGHT_OF_MANY: {
        **_QWEN2_MOE,
        "num_hidden_layers": 1,
        "num_experts": 16,
        "num_experts_per_tok": 8,
    },
    HYBRID_EXPERTS: {**_HYBRID, "model_type": "qwen3_5_moe_text", **_SHARED},
    INT4: in_few_bits(_CUT, 4, 32, offsets=True),
    INT4_WIDE: in_few_bits({**_CUT, "hidden_size": 96}, 4, 48),
    INT4_EXPERTS: in_few_bits(
        {**_EXPERTS, "intermediate_size": 192, "moe_intermediate_size": 192}, 4, 32, offsets=True
    ),
    INT8: in_few_bits({**_CUT, "tie_word_embeddings": False}, 8, ignore=()),
}
"""Configurations of the models that are not presets."""


@lru_cache(maxsize=32)
def pair_named(model: str) -> Pair:
    """Return a scaled-down preset, or a model defined above."""
    if model in (GELU, GELU_TANH, RELU, RELU2):
        eager = enlivened(AutoConfig.for_model(**OWN[model]))
        return Pair(captured_once(eager), eager, ModelWeights(eager))
    if model in _FEW_BITS:
        return few_bits_pair(AutoConfig.for_model(**OWN[model]))
    if model in (EXPERTS, WHOLE, SHARED, HYBRID_EXPERTS):
        eager = lively_experts(model)
        return Pair(captured_once(eager), eager, ModelWeights(eager))
    if model in OWN:
        return pair_of(AutoConfig.for_model(**OWN[model]))
    return preset_pair(model)


def lively_experts(model: str = EXPERTS) -> Any:
    """Return a new eager model with experts, of which the routers choose different ones."""
    return with_lively_routers(enlivened(AutoConfig.for_model(**OWN[model])))


def with_lively_routers(eager: Any) -> Any:
    """Draw the routers of a model, which choose the same experts for all tokens if they are new."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in eager.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.normal_(std=0.3, generator=generator)
    return eager


def rotated_whole(model: str) -> bool:
    """Return whether a model rotates whole heads, so that their halves can be interleaved."""
    config = pair_named(model).captured.config
    return config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0


def decode_passes(
    model: str,
    tp: int,
    spans: int,
    block: int,
    interleaved: bool = False,
    kv: str = CacheKv.kv,
) -> list[Pass]:
    """Return the pipeline of a model's decode steps."""
    passes = decode_pipeline(tp, spans, block, interleaved, kv)
    apart = ("fuse-qkv", "fuse-gate-up") if model == APART else ()
    if model == DELTA_APART:
        passes = with_delta_apart(passes)
    if model == WHOLE:
        passes = [
            replace(current, experts="ep") if isinstance(current, PlanSharding) else current
            for current in passes
        ]
    return [current for current in passes if current.name not in apart]


@dataclass(frozen=True)
class _FuseGates:
    """`fuse-delta` of weights of which only those of shares and decays have the same format."""

    name: ClassVar[str] = FuseDelta.name

    def apply(self, gm: fx.GraphModule) -> Report:
        blocks = delta_blocks(gm.graph)
        return fuse_at(
            gm,
            ((block.rule, partial(fuse_linears, gm, [block.beta, block.a])) for block in blocks),
        )


def with_delta_apart(passes: Sequence[Pass]) -> list[Pass]:
    """Return passes that leave the channels of linear attention and their gates apart."""
    return [_FuseGates() if isinstance(current, FuseDelta) else current for current in passes]
