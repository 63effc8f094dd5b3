"""Transposes around the rotation cancel, and heads without a projection are refused."""

from __future__ import annotations

import torch

from tests.passes.graphs import GraphBuilder, attention_graph, refusal
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import ATTENTION, RMS_NORM, ROPE
from tpcompile.passes.raise_attention import RaiseAttention
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten


def test_no_transpose_is_left_and_heads_are_rotated_tokens_first() -> None:
    gm = step("raise-attention").after.graph
    assert not calls(gm, aten.transpose.int)
    for node in calls(gm, ATTENTION):
        assert operand(node, 0).target is operand(node, 1).target is ROPE
        assert operand(node, 2).target is aten.unflatten.int


def test_heads_that_are_an_input_are_refused() -> None:
    builder = GraphBuilder()
    q, k, v = (builder.input(name, "T", 4, 8) for name in "qkv")
    gm = builder.done(builder.attention(q, k, v))
    message = refusal(RaiseAttention(), gm)
    assert "There is no attention in token-major form in the graph" in message
    assert "heads come from q, not from a projection that is split into heads" in message


def test_heads_that_stay_transposed_are_refused() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    heads = [builder.heads(builder.linear(x, name, 32, 16), 8) for name in "qkv"]
    q = builder.call(aten.transpose.int, heads[0], 1, 2)
    back = builder.call(
        aten.unflatten.int, builder.call(aten.flatten.using_ints, q, 1, 2), 1, [-1, 8]
    )
    normed = builder.call(aten.neg.default, back)
    gm = builder.done(builder.attention(normed, *heads[1:]))
    assert "heads come from aten.neg, not from a projection" in refusal(RaiseAttention(), gm)


def test_heads_behind_per_head_norms_are_taken() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    q, k, v = (builder.heads(builder.linear(x, name, 32, 16), 8) for name in "qkv")
    normed = builder.call(RMS_NORM, q, builder.parameter("scale", 8), 1e-6)
    gm = builder.done(builder.attention(normed, k, v))
    assert RaiseAttention().apply(gm).matches == 1


def test_one_good_attention_does_not_excuse_a_bad_one() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    q, k, v = (builder.heads(builder.linear(x, name, 32, 16), 8) for name in "qkv")
    starts = builder.input("starts", "S", dtype=torch.int64)
    good = builder.call(ATTENTION, q, k, v, starts, 0.25, None, 0)
    bad = builder.call(ATTENTION, builder.call(aten.neg.default, good), k, v, starts, 0.25, None, 1)
    assert "heads come from aten.neg" in refusal(RaiseAttention(), builder.done(bad))


def test_a_graph_without_attention_is_refused() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.call(aten.neg.default, builder.input("x", "T", 4)))
    assert "no candidate" in refusal(RaiseAttention(), gm)


def test_attention_without_rotation_is_token_major_already() -> None:
    assert RaiseAttention().apply(attention_graph()).matches == 1


def test_norms_of_transposed_heads_are_moved() -> None:
    """EXAONE 4 normalises heads after it has put them before the tokens."""
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    q, k, v = (builder.heads(builder.linear(x, name, 32, 16), 8) for name in "qkv")
    turned = builder.call(aten.transpose.int, q, 0, 1)
    normed = builder.call(RMS_NORM, turned, builder.parameter("scale", 8), 1e-6)
    back = builder.call(aten.transpose.int, normed, 0, 1)
    gm = builder.done(builder.attention(back, k, v))
    assert RaiseAttention().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert not calls(gm, aten.transpose.int)
    (norm,) = calls(gm, RMS_NORM)
    assert operand(norm) is q


def test_norms_over_other_axes_stay() -> None:
    """A norm over the heads of each element is not the norm of a head."""
    builder = GraphBuilder()
    x = builder.input("x", "T", 16)
    q, k, v = (builder.heads(builder.linear(x, name, 64, 16), 8) for name in "qkv")
    turned = builder.call(aten.transpose.int, q, 1, 2)
    normed = builder.call(RMS_NORM, turned, builder.parameter("scale", 8), 1e-6)
    back = builder.call(aten.transpose.int, normed, 1, 2)
    gm = builder.done(builder.attention(back, k, v))
    assert "heads come from aten.transpose" in refusal(RaiseAttention(), gm)
