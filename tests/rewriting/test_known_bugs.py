"""Bugs that other systems have had, as edits of a graph: each is refused, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from tests.captures import captured_once
from tpcompile.ir import checker
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import (
    Parameter,
    operand,
    parameter_of,
    parameters,
    set_parameter,
    value_type,
)
from tpcompile.ir.ops import ATTENTION, LINEAR, RMS_NORM, ROPE
from tpcompile.ir.recipe import Concat, Slice, Tensor, shape_of, take
from tpcompile.ir.types import Shard
from tpcompile.ir.values.expressions import Expressions
from tpcompile.passes import parse_pipeline, run_passes
from tpcompile.passes.pipeline import for_ranks
from tpcompile.presets import preset
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.proving import differs, rewrites_of
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
_SHARDED = (
    "canonicalize,split-heads,raise-norm,raise-gates,raise-rope,raise-swiglu,raise-experts,"
    "raise-attention,plan-sharding,shard-linears,kv-heads,vocab-parallel,insert-collectives"
)


def _graph(name: str, tp: int) -> fx.GraphModule:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**preset(name))
    captured = captured_once(config, dtype=torch.float32)
    return run_passes(captured.graph, for_ranks(parse_pipeline(_SHARDED), tp))[0]


def _refusal(name: str, tp: int, edit: Callable[[fx.GraphModule], None]) -> str:
    """Return the refusal of an edit of a sharded graph by types or by values, "" without one."""
    right = _graph(name, tp)
    wrong = clone(right)
    edit(wrong)
    problems = checker.check_graph(wrong)
    if problems:
        return str(problems[0])
    rewrites = frozenset(r for p in parse_pipeline(_SHARDED) for r in rewrites_of(p))
    expressions = Expressions()
    old, new = (expressions.of(gm, rewrites) for gm in (right, wrong))
    return str(differs(old, new) or "")


def _parameter(gm: fx.GraphModule, end: str) -> fx.Node:
    return next(node for node in parameters(gm.graph) if str(node.target).endswith(end))


def _heads_of_a_local_view(gm: fx.GraphModule) -> None:
    """View a sharded projection with the width of another number of heads, as DTensor's views."""
    heads = next(node for node in calls(gm, aten.unflatten.int))
    heads.update_arg(2, [-1, value_type(heads).shape[-1] // 2])  # type: ignore[operator]


def _even_heads(gm: fx.GraphModule) -> None:
    """Give each rank as many heads, although tp does not divide them: the last ones are lost."""
    node = _parameter(gm, "q_proj_weight")
    kind = value_type(node).placement
    assert isinstance(kind, Shard) and isinstance(kind.layout, Layout)
    units = kind.layout.units // kind.layout.ranks
    parts = tuple(((rank * units, (rank + 1) * units),) for rank in range(kind.layout.ranks))
    set_parameter(node, parameter_of(node).sharded(0, replace(kind.layout, parts=parts)))


def _kv_head_by_rank(gm: fx.GraphModule) -> None:
    """Give rank r the KV head r modulo their number, with more ranks than KV heads."""
    for end in ("k_proj_weight", "v_proj_weight"):
        node = _parameter(gm, end)
        kind = value_type(node).placement
        assert isinstance(kind, Shard) and isinstance(kind.layout, Layout)
        heads = kind.layout.units
        parts = tuple(((rank % heads, rank % heads + 1),) for rank in range(kind.layout.ranks))
        set_parameter(node, parameter_of(node).sharded(0, replace(kind.layout, parts=parts)))


def _fused_rows_as_one_run(gm: fx.GraphModule) -> None:
    """Cut a fused projection of queries, keys and values of linear attention into equal runs."""
    node = _parameter(gm, "in_proj_qkv_weight")
    parameter = parameter_of(node)
    rows, ranks = shape_of(parameter.whole)[0], len(parameter.shards)
    shards = tuple(
        take(parameter.whole, 0, rows * rank // ranks, rows * (rank + 1) // ranks)
        for rank in range(ranks)
    )
    set_parameter(node, Parameter(parameter.type, parameter.whole, shards))


def _along_the_wrong_dimension(gm: fx.GraphModule) -> None:
    """Split the weight of a row-parallel linear by rows."""
    node = _parameter(gm, "o_proj_weight")
    rows, ranks = value_type(node).shape[0], len(parameter_of(node).shards)
    assert isinstance(rows, int)
    parts = tuple(((rows * r // ranks, rows * (r + 1) // ranks),) for r in range(ranks))
    set_parameter(node, parameter_of(node).sharded(0, Layout("hidden", rows, 1, parts)))


def _some_rows_of_a_norm(gm: fx.GraphModule) -> None:
    """Read the first half of the scale of the head norms twice."""
    node = _parameter(gm, "q_norm_weight")
    whole = parameter_of(node).whole
    assert isinstance(whole, Tensor)
    half = whole.shape[0] // 2
    twice = Concat((Slice(whole, 0, 0, half), Slice(whole, 0, 0, half)), 0)
    kind = parameter_of(node).type
    set_parameter(node, Parameter(kind, twice, (twice,) * len(parameter_of(node).shards)))


def _without_rotation(gm: fx.GraphModule) -> None:
    for node in calls(gm, ROPE):
        node.replace_all_uses_with(operand(node))
        gm.graph.erase_node(node)


def _keys_for_values(gm: fx.GraphModule) -> None:
    node = calls(gm, ATTENTION)[0]
    node.update_arg(2, operand(operand(operand(node, 1))))


def _norm_of_another_layer(gm: fx.GraphModule) -> None:
    first, *_, last = calls(gm, RMS_NORM)
    weight = operand(last, 1)
    last.update_arg(1, operand(first, 1))
    gm.graph.erase_node(weight)


def _same_linear(gm: fx.GraphModule) -> None:
    """Compute up by the weight of gate."""
    gate, up = (_parameter(gm, f"l0_{part}_proj_weight") for part in ("gate", "up"))
    reader = next(node for node in up.users if node.target is LINEAR)
    reader.update_arg(1, gate)
    gm.graph.erase_node(up)


@pytest.mark.parametrize(
    ("name", "tp", "edit", "message"),
    [
        ("tiny-qwen3", 2, _heads_of_a_local_view, "whole-heads"),
        ("tiny-qwen3", 4, _even_heads, "no rank holds q_heads unit"),
        ("tiny-qwen3", 6, _kv_head_by_rank, "which query head"),
        ("tiny-qwen3.5", 2, _fused_rows_as_one_run, "breaks the rule recipe"),
        ("tiny-qwen3", 2, _along_the_wrong_dimension, "contraction-layout"),
        ("tiny-qwen3", 2, _some_rows_of_a_norm, "breaks the rule recipe"),
        ("tiny-qwen3", 2, _without_rotation, "before the pass"),
        ("tiny-qwen3", 2, _keys_for_values, "before the pass"),
        ("tiny-qwen3", 2, _norm_of_another_layer, "before the pass"),
        ("tiny-qwen3", 2, _same_linear, "before the pass"),
    ],
)
def test_bugs_are_refused(
    name: str, tp: int, edit: Callable[[fx.GraphModule], None], message: str
) -> None:
    assert _refusal(name, tp, lambda gm: None) == ""
    assert message in _refusal(name, tp, edit)
