"""Nodes without an instruction are reported, with the reason of the pass that refused them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.models import Pair, preset_pair
from tests.passes.decoding import DECODE, decode_stages
from tests.passes.test_fuse_residual_bias import biased_qwen3
from tests.passes.test_shard_linears import biased_llama
from tests.stages import graph_after, stages_of
from tpcompile.errors import ShardingError, UnsupportedError
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import (
    ATTENTION,
    CACHED_ATTENTION,
    LINEAR,
    PAGED_ATTENTION,
    RMS_NORM,
    SPECS,
    SWIGLU,
    op_name,
)
from tpcompile.ir.ops.elementwise import unary_rule
from tpcompile.ir.ops.spec import define, streaming_cost
from tpcompile.passes import decode_pipeline, default_pipeline, run_passes
from tpcompile.presets import preset
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls, insert_after, replace
from tpcompile.rewriting.structure import attention_blocks
from tpcompile.vm.lowering.leftovers import Leftover, leftovers, verify_nothing_left

aten = torch.ops.aten
MODELS: dict[str, Callable[[], Pair]] = {
    "tiny-qwen2": lambda: preset_pair("tiny-qwen2"),
    "tiny-qwen3": lambda: preset_pair("tiny-qwen3"),
    "biased qwen3": biased_qwen3,
    "biased llama": biased_llama,
}


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_is_left_of_a_decode_step(name: str, tp: int, interleaved: bool) -> None:
    passes = decode_pipeline(tp, spans=2, interleaved=interleaved)
    stages = stages_of(MODELS[name](), passes)
    gm = stages[-1].graph
    assert leftovers(gm) == []
    verify_nothing_left(gm)
    verify_nothing_left(stages[-1].graph)


@pytest.mark.parametrize("tp", [1, 2])
def test_nor_in_bf16(tp: int) -> None:
    config = AutoConfig.for_model(**{**preset("tiny-qwen3"), "dtype": "bfloat16"})
    graph = captured_once(config, dtype=torch.bfloat16).graph
    verify_nothing_left(run_passes(graph, decode_pipeline(tp))[0])


@pytest.mark.parametrize("tp", [1, 3])
def test_each_fusion_takes_what_is_left_before_it(tp: int) -> None:
    before, *fusions = decode_stages("tiny-qwen3", tp, 2)[-1 - len(DECODE) :]
    stages = [before, *(stage for stage in fusions if stage.stats.matches)]
    counts = [len(leftovers(stage.graph)) for stage in stages]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts) and counts[-1] == 0
    kinds = {op_name(left.node) for left in leftovers(stages[0].graph)}
    assert {"tpc.rms_norm", "tpc.rope", "tpc.paged_attention", "tpc.swiglu"} < kinds


def test_a_graph_of_the_standard_pipeline_is_refused() -> None:
    gm = graph_after(preset_pair("tiny-qwen3"), default_pipeline(2))
    with pytest.raises(UnsupportedError) as refused:
        verify_nothing_left(gm)
    message = str(refused.value)
    assert "%l0_input_normed is not part of any decode instruction" in message
    assert "no decode fusion considered it" in message
    assert "Lower the graph after all passes of the decode pipeline (-p decode)" in message
    assert "model.layers.0.input_layernorm modeling_qwen3.py" in message
    assert "more nodes are left over" in message


def changed(behind: str, change: Callable[[fx.GraphModule], None]) -> list[Leftover]:
    """Return the leftovers if the graph is changed after a pass."""
    passes = decode_pipeline()
    place = [current.name for current in passes].index(behind) + 1
    gm = graph_after(preset_pair("tiny-qwen3"), passes[:place])
    change(gm)
    gm, _ = run_passes(gm, passes[place:])
    return leftovers(gm)


def _values_of_another_input(gm: fx.GraphModule) -> None:
    _of_another_input(attention_blocks(gm.graph)[0].value)


def _of_another_input(linear: fx.Node) -> None:
    normed = operand(linear)
    linear.update_arg(0, insert_after(normed, aten.neg.default, normed))


def _queries_are_read(gm: fx.GraphModule) -> None:
    attention = calls(gm, PAGED_ATTENTION)[1]
    queries = operand(attention)
    other = insert_after(queries, aten.neg.default, queries)
    attention.update_arg(0, insert_after(other, aten.add.Tensor, queries, other))


def _another_eps(gm: fx.GraphModule) -> None:
    norm = operand(operand(calls(gm, ATTENTION)[1], 1))
    norm.update_arg(2, 1e-3)


def _keys_do_not_rotate(gm: fx.GraphModule) -> None:
    attention = calls(gm, ATTENTION)[0]
    attention.update_arg(1, operand(operand(attention, 1)))


def _gate_of_another_input(gm: fx.GraphModule) -> None:
    _of_another_input(operand(calls(gm, SWIGLU)[0]))


def _gate_is_scaled(gm: fx.GraphModule) -> None:
    node = calls(gm, SWIGLU)[1]
    node.update_arg(0, insert_after(operand(node), aten.mul.Tensor, operand(node), 2.0))


def _norm_is_the_residual(gm: fx.GraphModule) -> None:
    norm = calls(gm, RMS_NORM)[0]
    calls(gm, aten.add.Tensor)[0].update_arg(0, norm)


def _residual_is_scaled(gm: fx.GraphModule) -> None:
    added = calls(gm, aten.add.Tensor)[1]
    projected = operand(added, 1)
    added.update_arg(1, insert_after(projected, aten.mul.Tensor, projected, 0.5))


CHANGES: dict[str, tuple[str, Callable[[fx.GraphModule], None], str, str]] = {
    "values of another input": (
        "raise-attention",
        _values_of_another_input,
        "tpc.rope",
        "its input differs from that of %l0_q_proj",
    ),
    "norms of heads with two eps": (
        "raise-attention",
        _another_eps,
        "tpc.paged_attention",
        "its head norms must have the same epsilon, got [1e-06, 0.001]",
    ),
    "keys that do not rotate": (
        "raise-attention",
        _keys_do_not_rotate,
        "tpc.rope",
        "expected tpc.rope, got tpc.rms_norm",
    ),
    "queries with an addition": (
        "cache-kv",
        _queries_are_read,
        "aten.neg",
        "expected tpc.rope, got aten.add",
    ),
    "a gate of another input": (
        "raise-swiglu",
        _gate_of_another_input,
        "tpc.swiglu",
        "its input differs from that of %l0_gate_proj",
    ),
    "a gate that is scaled": (
        "fuse-gate-up",
        _gate_is_scaled,
        "tpc.swiglu",
        "expected getitem, got aten.mul",
    ),
    "a norm that is the residual": (
        "raise-attention",
        _norm_is_the_residual,
        "tpc.rms_norm",
        "%l0_residual also reads it",
    ),
    "a projection that is scaled": (
        "raise-attention",
        _residual_is_scaled,
        "aten.mul",
        "neither term is a projection",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_left_has_the_reason_of_the_pass_that_refused(name: str) -> None:
    behind, change, op, reason = CHANGES[name]
    remaining = changed(behind, change)
    matching = [left for left in remaining if op_name(left.node) == op]
    assert matching, [str(left) for left in remaining]
    for left in matching:
        assert reason in left.reason
        assert left.refused
        assert "tpcompile does not support this form" in left.hint
        assert str(left).startswith(f"%{left.node.name} = {op}(")


def test_spans_are_wanted() -> None:
    gm = decode_stages("tiny-qwen3", 1, 2)[-len(DECODE)].graph
    assert calls(gm, CACHED_ATTENTION) and not calls(gm, PAGED_ATTENTION)
    left = next(left for left in leftovers(gm) if left.node.target is CACHED_ATTENTION)
    assert not left.refused


def test_a_row_parallel_linear_whose_sum_is_not_taken_with_the_residual_is_left() -> None:
    gm = decode_stages("tiny-qwen3", 2, 2)[-2].graph
    remaining = [left for left in leftovers(gm) if left.node.target is LINEAR]
    assert len(remaining) == 4


def _doubled(self: torch.Tensor) -> torch.Tensor:
    return self * 2.0


def test_an_op_of_another_package_is_named() -> None:
    """It is named instead of its neighbours, which no fusion takes because of it."""
    op = define(_doubled, name="doubled_in_test", rule=unary_rule, cost=streaming_cost)
    gm = clone(captured_once("preset:tiny-qwen3").graph)
    try:
        query = next(n for n in calls(gm, LINEAR) if "q_proj" in str(n.args[1]))
        doubled = insert_after(query, op, query)
        replace(query, doubled)
        with pytest.raises(ShardingError, match=r"doubled_in_test is an op of the package tests"):
            run_passes(gm, default_pipeline(2))
        gm = run_passes(captured_once("preset:tiny-qwen3").graph, decode_pipeline())[0]
        source = operand(next(n for n in gm.graph.nodes if n.op == "output"))
        replace(source, insert_after(source, op, source))
        with pytest.raises(UnsupportedError, match=r"package tests, which must add an instr"):
            verify_nothing_left(gm)
    finally:
        del SPECS[op]
