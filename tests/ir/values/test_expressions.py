"""Expressions are put to numbers: what they say of a graph is what the graph computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.ir.values.evaluation import Numbers
from tests.models import Pair, batch, pair_of, preset_pair, relative_error, stage_logits
from tpcompile.ir.ops import ATTENTION, CAUSAL_CONV, EXPERTS, GATED_DELTA_RULE, SPECS
from tpcompile.ir.values.build import BIAS_AFTER_SUM
from tpcompile.ir.values.expressions import Expressions
from tpcompile.passes import parse_pipeline, run_passes
from tpcompile.passes.pipeline import for_ranks
from tpcompile.presets import preset
from tpcompile.runtime.kv.packing import Packed

_UNCACHED = (
    "canonicalize,split-heads,raise-norm,raise-gates,raise-rope,raise-swiglu,raise-experts,"
    "raise-attention,plan-sharding,shard-linears,kv-heads,vocab-parallel,insert-collectives,"
    "fuse-qkv,fuse-delta,fuse-gate-up,fuse-add-norm,select-rows,greedy-head"
)


def _numbers(pair: Pair, packed: Packed) -> Numbers:
    def reference(target: Any) -> Any:
        spec = SPECS[target]
        layer = {"layer": 0} if "layer" in spec.argument_names else {}
        return lambda **bound: spec.reference(**bound, **layer)

    def read(name: str) -> torch.Tensor:
        shape = next(t.shape for t in pair.captured.tensors.values() if t.name == name)
        return pair.read(name, tuple(slice(0, extent) for extent in shape))

    targets = (ATTENTION, CAUSAL_CONV, GATED_DELTA_RULE, EXPERTS)
    calls = {SPECS[target].name: reference(target) for target in targets}
    calls["tpc.rotary"] = pair.captured.rotary.fresh()
    inputs = packed.inputs()
    return Numbers(read, inputs, calls, len(inputs["input_ids"]))


def _hybrid() -> Pair:
    kinds = ["linear_attention", "full_attention"]
    values = {**preset("tiny-qwen3.5"), "num_hidden_layers": 2, "layer_types": kinds}
    return pair_of(AutoConfig.for_model(**values))


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3-moe", "hybrid"])
def test_expressions_are_what_the_graph_computes(name: str) -> None:
    pair = _hybrid() if name == "hybrid" else preset_pair(name)
    packed = batch((2, 1), pair.captured.config.vocab_size)
    expected = stage_logits(pair.captured.graph, pair, packed)
    expressions = Expressions()
    (before,) = expressions.of(pair.captured.graph).outputs
    with torch.inference_mode():
        found = _numbers(pair, packed).of(before)
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= 1e-5
    graph, _ = run_passes(pair.captured.graph, for_ranks(parse_pipeline(_UNCACHED), 2))
    declared = frozenset({BIAS_AFTER_SUM})
    logits, tokens = expressions.of(graph, declared).outputs
    assert logits.body is expressions.of(pair.captured.graph, declared).outputs[0].body
    assert tokens.shape == logits.shape[:1]
