"""The graphs to put mistakes into: small real models, sharded in several ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tpcompile.frontend import Captured, capture
from tpcompile.ir.recipe import Tensor, stored_tensors
from tpcompile.ir.simulate import whole_value
from tpcompile.passes import default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.presets import preset
from tpcompile.runtime.weights import RandomWeights

_SMALL = {"num_hidden_layers": 2, "max_position_embeddings": 256, "dtype": "float32"}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1009,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


_CUT = {**preset("tiny-qwen3"), "intermediate_size": 192, "vocab_size": 1009}
"""A model of which 4 ranks cut groups of 32 columns, in attention and in MLPs."""
_HYBRID = {
    **preset("tiny-qwen3.5"),
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "tie_word_embeddings": False,
}


def in_few_bits(
    values: dict[str, Any],
    bits: int,
    columns: int = 0,
    *,
    offsets: bool = False,
    ignore: Sequence[str] = ("lm_head",),
) -> dict[str, Any]:
    """Return a configuration whose linears have integers of 4 or 8 bits.

    `columns` share a scale, and an offset if there are any; 0 stands for whole rows.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not offsets,
        "strategy": "group" if columns else "channel",
        "group_size": columns or None,
    }
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignore),
    }
    return {**values, "quantization_config": scheme}


_UNFUSED = (
    "canonicalize,split-heads,raise-norm,raise-gates,raise-rope,raise-swiglu,raise-attention,"
    "plan-sharding,shard-linears,kv-heads,vocab-parallel,insert-collectives"
)
PIPELINES = {
    "fused": "",
    "unfused": _UNFUSED,
    "sequence-parallel": f"{_UNFUSED},sequence-parallel,fuse-qkv,fuse-gate-up",
    "decode": "decode{spans=2,block=4}",
    "interleaved": _UNFUSED.replace("raise-attention", "raise-attention,interleave-rotary"),
}
"""Pipelines that shard, as text; empty for the standard pipeline."""
SHARDED = ("fused", "unfused", "sequence-parallel")
CACHED = ("fused", "decode")


@dataclass(frozen=True)
class Subject:
    """A small model whose attention, embedding and MLP all affect the logits."""

    name: str
    values: dict[str, Any] = field(hash=False, compare=False)
    tps: tuple[int, ...]
    pipelines: tuple[str, ...] = tuple(PIPELINES)

    @cached_property
    def captured(self) -> Captured:
        from transformers import AutoConfig

        return capture(AutoConfig.for_model(**self.values), dtype=torch.float32)

    @cached_property
    def read(self) -> UnitGain:
        return UnitGain(RandomWeights(self.captured, seed=0), self.captured.tensors.values())


TILED = " repeated to "
"""Separator in the name of a repeated tensor, between the tensor and the number of elements."""


class UnitGain:
    """Random tensors whose matrices preserve the magnitude of their inputs.

    With the standard deviation of an untrained model a layer hardly changes the residual, and a
    mistake in attention could hide in the rounding of the logits.
    """

    def __init__(self, source: RandomWeights, tensors: Iterable[Tensor]) -> None:
        self._source = source
        self._tensors: dict[str, torch.Tensor] = {}
        self._scaled = {
            stored.name: tensor
            for tensor in tensors
            for stored, part in stored_tensors([tensor])
            if part is not None and part.dtype.torch.is_floating_point
        }
        """The weights of few bits, by the names of their scales."""

    def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if name not in self._tensors:
            source, _, length = name.partition(TILED)
            tensor = self._source.whole(source)
            if length:
                tensor = tensor.repeat(-(-int(length) // len(tensor)))[: int(length)]
            if name in self._scaled:
                tensor = tensor / _gain(whole_value(self._scaled[name], self._source, tensor.dtype))
            elif tensor.dim() == 2 and tensor.is_floating_point():
                tensor = tensor / _gain(tensor)
            self._tensors[name] = tensor
        return self._tensors[name][index]


def _gain(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.std() * matrix.shape[1] ** 0.5


@dataclass(frozen=True)
class Graph:
    """A subject, sharded over some ranks by one of the pipelines."""

    subject: Subject
    tp: int
    pipeline: str

    @property
    def name(self) -> str:
        return f"{self.subject.name} tp={self.tp} {self.pipeline}"

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The sharded graph. It never changes: mistakes are put into clones."""
        text = PIPELINES[self.pipeline]
        passes = for_ranks(parse_pipeline(text), self.tp) if text else default_pipeline(self.tp)
        return run_passes(self.subject.captured.graph, passes)[0]

    @cached_property
    def prefill(self) -> fx.GraphModule:
        """The graph with a KV cache that takes any number of tokens."""
        passes = for_ranks(parse_pipeline(PIPELINES[self.pipeline]), self.tp)
        names = [current.name for current in passes]
        prefix = passes[: names.index("cache-kv") + 1]
        return run_passes(self.subject.captured.graph, prefix)[0]


SUBJECTS = (
    Subject("tiny-qwen2", preset("tiny-qwen2"), (2, 3, 5)),
    Subject("tiny-qwen3", preset("tiny-qwen3"), (2, 3, 4, 6)),
    Subject(
        "small-qwen2.5-0.5b",
        {
            **preset("qwen2.5-0.5b"),
            **_SMALL,
            "hidden_size": 112,
            "intermediate_size": 608,
            "vocab_size": 1009,
        },
        (2, 4, 5),
    ),
    Subject(
        "small-qwen3-8b",
        {
            **preset("qwen3-8b"),
            **_SMALL,
            "hidden_size": 256,
            "intermediate_size": 768,
            "head_dim": 8,
            "vocab_size": 1009,
        },
        (2, 4, 6),
    ),
    Subject("biased-llama", {**_LLAMA, **_SMALL}, (2, 4, 5)),
    Subject("int4-qwen3", in_few_bits(_CUT, 4, 32, offsets=True), (2, 4, 3)),
    Subject("int8-qwen3", in_few_bits(_CUT, 8), (2, 3)),
    Subject("tiny-qwen3.5", _HYBRID, (2, 4, 5), ("fused", "unfused")),
)


def graphs(subjects: Iterable[Subject] = SUBJECTS) -> Iterator[Graph]:
    """Yield every subject at each of its tp with each pipeline."""
    for subject in subjects:
        for tp in subject.tps:
            for pipeline in subject.pipelines:
                yield Graph(subject, tp, pipeline)
