"""Expressions of calls over the names of their operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tpcompile.ir.ops import SPECS, SWIGLU
from tpcompile.ir.values.local import LocalExpressions
from tpcompile.passes import decode_pipeline, run_passes
from tpcompile.presets import preset

_NORMED = (
    "(%l1_linear_residual[i, k] · rsqrt(1e-06 + mean(pow(%l1_linear_residual[i, k], 2)))) · "
    "model.layers.1.post_attention_layernorm.weight[k]"
)
_UP, _GATE = (
    f"linear({_NORMED}, model.layers.1.mlp.{part}_proj.weight[j, k])" for part in ("up", "gate")
)
_SHOWN = {
    "input_ids": [],
    "l0_q_norm_weight": ["model.layers.0.self_attn.q_norm.weight[i]"],
    "l1_norm_gate_up_swiglu": [f"{_UP} · silu({_GATE})"],
    "l0_values": ["%l0_partial_attention.0[i, j, l]"],
    "l1_attention_flat": ["%l1_attention_reduce[i, j/16, j%16]"],
    "tokens": ["argmax(%norm_linear[i, k])"],
    "output": [],
}


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    captured = captured_once(config, dtype=torch.float32).graph
    return run_passes(captured, decode_pipeline(1))[0]


def test_operands_have_names(graph: fx.GraphModule) -> None:
    local = LocalExpressions()
    texts = {node.name: local.of(node) for node in graph.graph.nodes}
    assert {name: texts[name] for name in _SHOWN} == _SHOWN


def test_every_call_has_an_expression_of_each_result(graph: fx.GraphModule) -> None:
    local = LocalExpressions()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            kind, texts = node.meta["type"], local.of(node)
            assert len(texts) == (len(kind) if isinstance(kind, tuple) else 1)
            for operand in node.all_input_nodes:
                written = operand.name in ("cache", "slots")
                named = f"%{operand.name}" in "".join(texts)
                assert operand.op == "get_attr" or named or written


def test_an_op_without_a_rule_is_a_call_of_its_operands(
    graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECS, SWIGLU, replace(SPECS[SWIGLU], value=None))
    new_graph = fx.Graph()
    gate, up = (new_graph.placeholder(name) for name in ("gate", "up"))
    kind = next(n for n in graph.graph.nodes if n.name == "l1_norm_gate_up_swiglu").meta["type"]
    for node in (gate, up):
        node.meta["type"] = kind
    call = new_graph.call_function(SWIGLU, (gate, up))
    call.meta["type"] = kind
    assert LocalExpressions().of(call) == ["swiglu(%gate[i, j], %up[i, j])[i, j]"]
