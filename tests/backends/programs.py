"""Programs of small models in any dtype, with empty caches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from transformers import AutoConfig

from tests.backends.reference.step_models import OWN
from tests.captures import captured_once
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.rotation import CPU, rotation_of
from tpcompile.frontend import Captured
from tpcompile.gguf.kinds import GgufKind
from tpcompile.ir.simulate import components, materialise
from tpcompile.options import scheme_of
from tpcompile.passes import run_passes
from tpcompile.passes.cache_kv import CacheKv
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.presets import preset
from tpcompile.runtime.weights import RandomWeights
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

ODD = {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 1001}
"""Widths that fill neither vectors nor tiles."""
LONG = 1063
"""The same, of more columns than a block of rows holds at a time."""


def _hidden(columns: int) -> dict[str, int]:
    """Return widths of a residual of so many columns. One layer has all linears."""
    widths = {"hidden_size": columns, "intermediate_size": 2100}
    return {**widths, "vocab_size": 301, "num_hidden_layers": 1}


def _wide(columns: int) -> dict[str, int]:
    """Return widths with a projection of so many columns in each of the eight parts of a sum."""
    return {"intermediate_size": 8 * columns, "vocab_size": 301, "num_hidden_layers": 1}


ROUNDS = ":a8"
"""The end of the name of weights whose linears round their inputs to int8."""


KINDS = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Kinds of GGUF files whose formats nothing else has."""

FLOATS8 = {"fp8:row": None, "fp8:32": [16, 32], "fp8:128": [128, 128]}
"""Formats of 8-bit floating point, and the rows and columns of their blocks."""
APART = ":head"
"""The end of the name of 8-bit floating point whose head has the dtype of the model."""


def _kinds(config: Any, kind: str) -> dict[str, str]:
    """Return the kind of each linear, and of the embedding."""
    names = [f"self_attn.{letter}_proj" for letter in "qkvo"]
    names += [f"mlp.{side}_proj" for side in ("gate", "up", "down")]
    layers = range(config.num_hidden_layers)
    weights = [f"model.layers.{layer}.{name}.weight" for layer in layers for name in names]
    return dict.fromkeys([*weights, "model.embed_tokens.weight", "lm_head.weight"], kind)


@lru_cache
def _captured(
    model: str, dtype: torch.dtype, odd: bool, hidden: int, wide: int, weights: str | None
) -> Captured:
    widths = ODD if odd else {}
    widths = widths | (_hidden(hidden) if hidden else {}) | (_wide(wide) if wide else {})
    values = OWN[model] if model in OWN else preset(model)
    stored = None if weights is None else weights.removesuffix(ROUNDS)
    config = AutoConfig.for_model(**{**values, **widths})
    if stored in GgufKind.__members__:
        config.quantization_config = {"quant_method": "gguf", "kinds": _kinds(config, stored)}
        config.tie_word_embeddings = False
        return captured_once(config, dtype=dtype, rounds=stored != weights)
    if stored is not None and stored.removesuffix(APART) in FLOATS8:
        config.quantization_config = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": FLOATS8[stored.removesuffix(APART)],
            "modules_to_not_convert": ["lm_head"] if stored.endswith(APART) else [],
        }
        config.tie_word_embeddings = False
        return captured_once(config, dtype=dtype)
    return captured_once(
        config,
        dtype=dtype,
        scheme=None if stored is None else scheme_of(stored, None),
        rounds=stored != weights,
    )


@lru_cache
def _graph(
    model: str,
    dtype: torch.dtype,
    tp: int,
    odd: bool,
    hidden: int,
    wide: int,
    weights: str | None,
    kv: str,
    experts: str,
) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Return the decode graph, and the weights of each rank."""
    captured = _captured(model, dtype, odd, hidden, wide, weights)
    passes = [
        replace(current, experts=experts) if isinstance(current, PlanSharding) else current
        for current in decode_pipeline(tp, 2, 4, kv=kv)
    ]
    graph, _ = run_passes(captured.graph, passes)
    read = RandomWeights(captured, 0)
    return graph, materialise(graph, read) | components(graph, read)


@lru_cache
def _program(kind: tuple[Any, ...], batch: int, workers: int, longest: int, steps: int) -> Program:
    """Return the program of a decode graph for so many sequences."""
    target = replace(target_of("cpu", workers), grain=4)
    plan = StepPlan.on(target, batch=batch, max_seq_len=longest, context=32, steps=steps)
    return scheduled(_graph(*kind)[0], target, plan).proved


def memory_of(
    model: str,
    dtype: torch.dtype,
    tp: int,
    batch: int,
    *,
    workers: int = 2,
    odd: bool = False,
    hidden: int = 0,
    wide: int = 0,
    few_bits: str | None = None,
    kv: str = CacheKv.kv,
    experts: str = PlanSharding.experts,
    longest: int = 32,
    steps: int = 8,
    device: torch.device = CPU,
) -> StepMemory:
    """The memory of a program for so many sequences, which have no tokens yet.

    With `few_bits`, such as `int4:64` or `int4:64:a8`, linears have random weights of few bits. A
    kind of GGUF files is also that of the embedding. Others are of 8-bit floating point.
    """
    kind = (model, dtype, tp, odd, hidden, wide, few_bits, kv, experts)
    weights = _graph(*kind)[1]
    program = _program(kind, batch, workers, longest, steps)
    rotation = rotation_of(
        program, _captured(model, dtype, odd, hidden, wide, few_bits).rotary.fresh()
    )
    return StepMemory(
        program, lambda rank, name: weights[name][rank].to(device), rotation, device=device
    )
