"""The batch dimension is removed and views become unflatten and flatten, without changing a bit."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder, refusal
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import GATED_DELTA_RULE, op_name
from tpcompile.ir.types import ValueType
from tpcompile.passes.canonicalize import Canonicalize, _take_one_of_equals

aten = torch.ops.aten


@pytest.mark.parametrize(("model", "dropped"), [("tiny-qwen2", 18), ("tiny-qwen3", 26)])
def test_matches_are_the_nodes_dropped(model: str, dropped: int) -> None:
    stats = step("canonicalize", model).after.stats
    assert stats.matches == dropped == stats.nodes_before - stats.nodes_after


def test_no_value_keeps_the_batch_dimension() -> None:
    nodes = step("canonicalize").after.graph.graph.nodes
    kinds = [node.meta["type"] for node in nodes if "type" in node.meta]
    # `cos` and `sin` broadcast over heads; no other value may have a leading dimension of 1
    leading = {kind.shape for kind in kinds if isinstance(kind, ValueType) and kind.shape[0] == 1}
    assert leading == {(1, "T", 16)}


def test_a_cast_that_changes_the_dtype_stays() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 8, dtype=torch.bfloat16)
    wide = builder.call(aten.to.dtype, x, torch.float32)
    same = builder.call(aten.to.dtype, wide, torch.float32)
    gm = builder.done(same)
    assert Canonicalize().apply(gm).matches == 1
    assert [op_name(n) for n in gm.graph.nodes if n.op == "call_function"] == ["aten.to"]


@pytest.mark.parametrize(
    ("second", "remaining"), [((0, 1), []), ((-2, 0), []), ((1, 2), ["aten.transpose"] * 2)]
)
def test_only_transposes_that_undo_each_other_cancel(
    second: tuple[int, int], remaining: list[str]
) -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 4, 8)
    first = builder.call(aten.transpose.int, x, 1, 0)
    gm = builder.done(builder.call(aten.transpose.int, first, *second))
    second_is_of_dims_0_and_1 = {dim % 3 for dim in second} == {0, 1}
    assert second_is_of_dims_0_and_1 == (not remaining)
    Canonicalize().apply(gm)
    assert [op_name(n) for n in gm.graph.nodes if n.op == "call_function"] == remaining
    assert check_graph(gm) == []


def test_a_view_that_regroups_stays_a_view() -> None:
    """A view of [T, 4, 6] as [T, 8, 3] remains, since it neither splits nor merges dimensions."""
    builder = GraphBuilder()
    x = builder.input("x", "T", 4, 6)
    count = builder.call(aten.sym_size.int, x, 0)
    gm = builder.done(builder.call(aten.view.default, x, [count, 8, 3]))
    assert Canonicalize().apply(gm).matches == 0
    assert "aten.view" in [op_name(node) for node in gm.graph.nodes]


def test_work_on_the_batch_dimension_is_refused() -> None:
    builder = GraphBuilder()
    ids = builder.input("input_ids", "T", dtype=torch.int64)
    batched = builder.call(aten.unsqueeze.default, ids, 0)
    rows = builder.call(aten.embedding.default, builder.parameter("w", 9, 4), batched)
    gm = builder.done(builder.call(aten.transpose.int, rows, 0, 1))
    message = refusal(Canonicalize(), gm)
    assert "operates on the batch dimension" in message
    assert "%transpose" in message


def test_an_empty_part_of_a_concatenation_is_dropped() -> None:
    """Heads that are rotated whole are joined with the other elements, of which there are none."""
    for stop, left in ((8, 0), (6, 1)):
        builder = GraphBuilder()
        x = builder.input("x", "T", 8)
        first = builder.call(aten.slice.Tensor, x, 1, 0, stop)
        second = builder.call(aten.slice.Tensor, x, 1, stop, 8)
        gm = builder.done(builder.call(aten.cat.default, [first, second], -1))
        Canonicalize().apply(gm)
        assert check_graph(gm) == []
        assert len(gm.graph.find_nodes(op="call_function", target=aten.cat.default)) == left
        values = torch.randn(3, 8)
        gm.recompile()
        assert torch.equal(gm(values), values)


def test_a_row_of_equal_ones_is_the_value_that_was_expanded() -> None:
    """Positions in three parts, which are one for text, are taken from the only one."""
    for dim, expanded in ((0, False), (1, True)):
        builder = GraphBuilder()
        x = builder.input("x", 1, "T", dtype=torch.int64)
        rows = builder.call(
            aten.expand.default, builder.call(aten.unsqueeze.default, x, 0), [3, -1, -1]
        )
        gm = builder.done(builder.call(aten.select.int, rows, dim, 0))
        _take_one_of_equals(gm.graph)
        assert check_graph(gm) == []
        assert bool(gm.graph.find_nodes(op="call_function", target=aten.expand.default)) == expanded


def test_casts_chunks_and_dropped_dimensions() -> None:
    builder = GraphBuilder()
    x, like = builder.input("x", "T", 8), builder.input("like", "T", 8, dtype=torch.bfloat16)
    same = builder.call(aten.type_as.default, x, x)
    narrow = builder.call(aten.type_as.default, same, like)
    parts = builder.call(aten.chunk.default, narrow, 2, -1)
    items = [builder.graph.call_function(operator.getitem, (parts, place)) for place in range(2)]
    for place, item in enumerate(items):
        item.meta["type"] = parts.meta["type"][place]
    weight = builder.parameter("w", 8, 1, 4)
    again = builder.call(aten.unsqueeze.default, builder.call(aten.squeeze.dim, weight, 1), 1)
    gm = builder.done(builder.call(aten.cat.default, [*items, items[0]], 1))
    gm.graph.find_nodes(op="output")[0].args = ((items[0], items[1], again),)
    Canonicalize().apply(gm)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    wanted = [aten.to.dtype, aten.split_with_sizes.default, operator.getitem, operator.getitem]
    assert targets == wanted


def repeated_heads(
    times: tuple[int, int] = (2, 2), *, key_heads: int = 2, also_read: bool = False
) -> fx.GraphModule:
    """Return a delta rule of `[1, T, heads, width]` whose queries and keys are repeated first."""
    builder = GraphBuilder()
    heads = {"q": 2, "k": key_heads, "v": 4}
    inputs = [builder.input(name, "T", count, 3) for name, count in heads.items()]
    q, k, v = (builder.call(aten.unsqueeze.default, x, 0) for x in inputs)
    gates = [builder.call(aten.unsqueeze.default, builder.input(name, "T", 4), 0) for name in "db"]
    starts = builder.input("starts", "S", dtype=torch.int64)
    wide_q, wide_k = (
        builder.call(aten.repeat_interleave.self_int, x, count, 2) if count > 1 else x
        for x, count in zip((q, k), times, strict=True)
    )
    mixed = builder.call(GATED_DELTA_RULE, wide_q, wide_k, v, *gates, starts, 0)
    result = builder.call(aten.add.Tensor, mixed, wide_k) if also_read else mixed
    return builder.done(builder.call(aten.select.int, result, 0, 0))


def test_the_delta_rule_reads_heads_before_they_are_repeated() -> None:
    gm = repeated_heads()
    before = copy.deepcopy(gm)
    assert Canonicalize().apply(gm).matches == 8
    assert check_graph(gm) == []
    (rule,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert [arg.name for arg in rule.args[:3]] == ["q", "k", "v"]
    gm.recompile()
    before.recompile()
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 3), torch.randn(5, 2, 3), torch.randn(5, 4, 3)
    operands = q, k, v, -torch.rand(5, 4), torch.rand(5, 4), torch.tensor([0, 2, 5])
    assert torch.equal(gm(*operands), before(*operands))


def test_other_repetitions_are_refused() -> None:
    """Keys that another op reads, and keys alone, are repeated for more than the delta rule."""
    for gm in (repeated_heads(also_read=True), repeated_heads((1, 2), key_heads=1)):
        message = refusal(Canonicalize(), gm)
        assert "%repeat_interleave" in message
        assert "aten.repeat_interleave repeats heads" in message
