"""Small real models for tests: the presets' structure, seeded weights, and Hugging Face's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM

from tests.captures import captured_once
from tpcompile.frontend import Captured
from tpcompile.ir.info import info_of
from tpcompile.ir.ops.collectives import to_whole
from tpcompile.ir.pieces import Read
from tpcompile.ir.simulate import Values, logits_of, materialise, run_ranks, whole_value
from tpcompile.presets import preset
from tpcompile.runtime.kv.packing import Packed, pack
from tpcompile.runtime.weights import ModelWeights, RandomWeights

TOLERANCE = 1e-5
"""The largest allowed error of fp32 logits relative to the largest eager logit.

Both sides add the same products in different orders.
"""

NEXT = "tiny-qwen3-next"
"""The name of a tiny Qwen3-Next without experts, which is not a preset."""

NEXT_CONFIG = {
    **preset("tiny-qwen3.5"),
    "model_type": "qwen3_next",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "num_experts": 0,
}
"""The sizes of `tiny-qwen3.5`."""

VOCABULARY = 1009
"""A prime, so that no tp from 2 to 8 divides it."""


_WIDTHS = ("hidden_size", "intermediate_size")
"""The ends of the names of widths, also of those of experts."""


def scaled_config(name: str, **changes: Any) -> Any:
    """Return a preset with its heads, biases, norms and tying, but small sizes.

    All widths shrink by one factor, which preserves the ratio of attention width to hidden size.
    """
    values = preset(name)
    heads = values["num_attention_heads"]
    width = values.get("head_dim") or values["hidden_size"] // heads
    factor = width // 8
    small = {
        **{name: size // factor for name, size in values.items() if name.endswith(_WIDTHS)},
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if "head_dim" in values:
        small["head_dim"] = width // factor
    if "full_attention_interval" in values:
        small["full_attention_interval"] = 2
        small |= {f"linear_{name}_head_dim": width // factor for name in ("key", "value")}
    return AutoConfig.for_model(**{**values, **small, **changes})


def long_config() -> Any:
    """Return the configuration of `tiny-qwen3`, with positions for 2,048 tokens."""
    return AutoConfig.for_model(**{**preset("tiny-qwen3"), "max_position_embeddings": 2048})


@dataclass(frozen=True, eq=False)
class Pair:
    """A captured model, and Hugging Face's eager model with the same weights.

    Tests of many passes share it, and do not change it.
    """

    captured: Captured
    eager: Any
    read: Read
    """The weights of the eager model, without a copy, or those of few bits that it stands for."""


def load_into(model: torch.nn.Module, weights: RandomWeights) -> None:
    """Copy weights into a Hugging Face model of the same configuration."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.whole(name))


def pair_of(config: Any, seed: int = 0) -> Pair:
    """Return the pair for a configuration, with weights from a seed."""
    captured = captured_once(config, dtype=torch.float32)
    eager = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    load_into(eager, RandomWeights(captured, seed))
    return Pair(captured, eager, ModelWeights(eager))


def few_bits_pair(config: Any, seed: int = 0) -> Pair:
    """Return the pair for a configuration whose linears have weights of few bits, from a seed."""
    captured = captured_once(config, dtype=torch.float32)
    read = RandomWeights(captured, seed)
    plain = {
        name: value for name, value in config.to_dict().items() if name != "quantization_config"
    }
    eager = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**plain), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            parameter.copy_(whole_value(captured.tensors[name], read, torch.float32))
    return Pair(captured, eager, read)


@lru_cache(maxsize=32)
def preset_pair(name: str) -> Pair:
    """Return a scaled preset (`qwen3-8b`), an unscaled tiny one (`tiny-qwen3`), or `NEXT`."""
    if name == NEXT:
        return pair_of(AutoConfig.for_model(**NEXT_CONFIG))
    if name.startswith("tiny"):
        return pair_of(AutoConfig.for_model(**preset(name)))
    return pair_of(scaled_config(name))


def batch(lengths: Sequence[int], vocabulary: int = VOCABULARY, seed: int = 0) -> Packed:
    """Return random tokens for sequences of these lengths; logits are requested for all tokens."""
    ids, mask = padded(lengths, vocabulary, seed)
    return pack(ids, mask)


def padded(
    lengths: Sequence[int], vocabulary: int = VOCABULARY, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same batch in Hugging Face's form: ids and mask, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(vocabulary, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, longest - length :] = 1
    return ids, mask


def eager_logits(eager: Any, lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Return Hugging Face's logits of the real tokens of `padded(lengths)`, one row per token."""
    ids, mask = padded(lengths, eager.config.vocab_size, seed)
    with torch.inference_mode():
        logits: torch.Tensor = eager(ids, attention_mask=mask).logits
    return logits[mask.bool()]


def run(gm: fx.GraphModule, pair: Pair, packed: Packed) -> Values:
    """Return all values of a stage's graph on simulated ranks."""
    inputs = packed.inputs()
    with torch.inference_mode():
        weights = materialise(gm, pair.read)
        return run_ranks(gm, inputs, weights, pair.captured.rotary.fresh())


def whole(node: fx.Node, values: Values) -> torch.Tensor:
    """Reassemble a value from its ranks by its type."""
    return to_whole(values[node], node.meta["type"])


def stage_logits(gm: fx.GraphModule, pair: Pair, packed: Packed) -> torch.Tensor:
    """Return the result of a stage; assert that all ranks return the same bits."""
    values = run(gm, pair, packed)
    first, *other_logits = logits_of(values)
    assert len(other_logits) == info_of(gm).tp - 1
    for other in other_logits:
        assert torch.equal(first, other)
    return first


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude; infinite if not all are finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())
