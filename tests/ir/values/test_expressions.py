"""Expressions are put to numbers: what they say of a graph is what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.ir.values.evaluation import Numbers
from tests.models import Pair, batch, pair_of, preset_pair, relative_error, stage_logits
from tests.passes.graphs import GraphBuilder
from tpcompile.ir.meta import operand, parameter_of, parameters
from tpcompile.ir.ops import (
    ATTENTION,
    CAUSAL_CONV,
    EXPERTS,
    GATED_DELTA_RULE,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
    SPECS,
)
from tpcompile.ir.values.build import BIAS_AFTER_SUM
from tpcompile.ir.values.expressions import Expressions, UnprovedError
from tpcompile.passes import parse_pipeline, run_passes
from tpcompile.passes.pipeline import for_ranks
from tpcompile.presets import preset
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.proving import differs, rewrites_of
from tpcompile.rewriting.rewrite import calls
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
        actual = _numbers(pair, packed).of(before)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-5
    graph, _ = run_passes(pair.captured.graph, for_ranks(parse_pipeline(_UNCACHED), 2))
    declared = frozenset({BIAS_AFTER_SUM})
    logits, tokens = expressions.of(graph, declared).outputs
    assert logits.body is expressions.of(pair.captured.graph, declared).outputs[0].body
    assert tokens.shape == logits.shape[:1]


_STANDARD = for_ranks(parse_pipeline("standard"), 2)
_REWRITES = frozenset(rewrite for current in _STANDARD for rewrite in rewrites_of(current))


def _standard(name: str) -> fx.GraphModule:
    captured = captured_once(AutoConfig.for_model(**preset(name)), dtype=torch.bfloat16)
    return clone(run_passes(captured.graph, _STANDARD)[0])


def _weights(gm: fx.GraphModule, end: str) -> list[fx.Node]:
    return [node for node in parameters(gm.graph) if str(node.target).endswith(end)]


def _exchange(first: fx.Node, second: fx.Node) -> None:
    first_parameter, second_parameter = parameter_of(first), parameter_of(second)
    first.meta["parameter"], second.meta["parameter"] = second_parameter, first_parameter


def _weight_of_another_layer(gm: fx.GraphModule) -> None:
    first, second, *_ = _weights(gm, "o_proj_weight")
    first.meta["parameter"] = parameter_of(second)


def _weight_of_another_dtype(gm: fx.GraphModule) -> None:
    node, *_ = _weights(gm, "o_proj_weight")
    known = parameter_of(node)
    other = replace(known.type, dtype=torch.float16)
    node.meta["parameter"] = replace(known, type=other)


def _layers_swapped(gm: fx.GraphModule) -> None:
    """Exchange all parameters of two layers, so that each layer alone is a right one."""
    for node in list(parameters(gm.graph)):
        if node.name.startswith("l0_"):
            (other,) = _weights(gm, node.name.replace("l0_", "l1_"))
            _exchange(node, other)


def _norm_of_one_layer(gm: fx.GraphModule) -> None:
    calls(gm, RMS_NORM)[-2].update_arg(2, 1e-3)


def _rotation_of_one_layer(gm: fx.GraphModule) -> None:
    calls(gm, ROPE)[2].update_arg(0, operand(calls(gm, ROPE)[0]))


def _cache_of_another_layer(gm: fx.GraphModule) -> None:
    first, second, *_ = calls(gm, PAGED_ATTENTION)
    place = SPECS[PAGED_ATTENTION].argument_names.index("layer")
    first.update_arg(place, second.args[place])


_EDITS = (
    _weight_of_another_layer,
    _weight_of_another_dtype,
    _layers_swapped,
    _norm_of_one_layer,
    _rotation_of_one_layer,
    _cache_of_another_layer,
)


@pytest.mark.parametrize("edit", _EDITS)
def test_a_graph_that_is_read_again_is_read_where_it_has_changed(
    edit: Callable[[fx.GraphModule], None],
) -> None:
    """Nodes are edited in place, so most calls are those of the first reading."""
    gm = _standard("tiny-qwen3")
    shared = Expressions()
    right = shared.of(gm, _REWRITES)
    assert differs(right, shared.of(gm, _REWRITES)) is None
    edit(gm)
    again = shared.of(gm, _REWRITES)
    assert differs(right, again) is not None
    assert differs(again, shared.of(clone(gm), _REWRITES)) is None  # all nodes of a clone are new


def test_calls_with_arguments_of_other_names_differ() -> None:
    builder = GraphBuilder()
    heads = builder.heads(builder.input("x", "T", 16), 8)
    cos, sin = builder.tables(8)
    right = builder.call(ROPE, heads, cos=cos, sin=sin)
    wrong = builder.call(ROPE, heads, sin=cos, cos=sin)
    gm = builder.done(builder.call(torch.ops.aten.sub.Tensor, right, wrong))
    values = Expressions().of(gm).nodes
    assert values[right].body is not values[wrong].body


def test_a_reading_that_fails_leaves_nothing_behind() -> None:
    gm = _standard("tiny-qwen3")
    expressions = Expressions()
    right = expressions.of(gm, _REWRITES)
    _weight_of_another_layer(gm)
    (projected,) = _weights(gm, "o_proj_weight")[0].users
    target, projected.target = projected.target, torch.ops.aten.logit.default
    with pytest.raises(UnprovedError, match="logit"):
        expressions.of(gm, _REWRITES)
    projected.target = target
    assert differs(right, expressions.of(gm, _REWRITES)) is not None
