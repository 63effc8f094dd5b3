"""Tests of column-parallel and row-parallel linears, and of invalid operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import infer, operand, random, refused, run, whole_numbers
from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, layouts
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.types import PARTIAL, REPLICATE, Shard, ValueType

X, W, B = random(3, 8), random(6, 8, seed=1), random(6, seed=2)
IN, OUT = Layout("in", 4, 2, even_runs(4, 2)), Layout("out", 6, 1, even_runs(6, 2))


@EXAMPLES
@given(st.data(), RANKS, st.booleans(), st.integers(1, 3))
def test_column_parallel(data: st.DataObject, ranks: int, biased: bool, rank: int) -> None:
    """The output features have the layout of the weight's rows, including shared and fused ones."""
    layout = data.draw(
        st.one_of(layouts(ranks, overlapping=True), fused_layouts(ranks, overlapping=True))
    )
    x = random(*(3, 2, 5)[3 - rank :])
    weight = random(layout.size, 5, seed=1).sharded(0, layout)
    bias = [random(layout.size, seed=2).sharded(0, layout)] if biased else []
    outcome = run(LINEAR, x, weight, *bias, ranks=ranks)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == Shard(rank - 1, layout)
    outcome.assert_sound()


@EXAMPLES
@given(st.data(), RANKS)
def test_row_parallel(data: st.DataObject, ranks: int) -> None:
    """If input and columns share a layout without overlap, the result is a partial sum."""
    layout = data.draw(st.one_of(layouts(ranks), fused_layouts(ranks)))
    x = whole_numbers(3, layout.size).sharded(1, layout)
    weight = whole_numbers(4, layout.size, seed=1).sharded(1, layout)
    outcome = run(LINEAR, x, weight, ranks=ranks)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == PARTIAL
    outcome.assert_sound(exact=True)


@EXAMPLES
@given(RANKS, st.booleans(), st.integers(1, 7))
def test_whole_weights_keep_the_placement_of_the_input(
    ranks: int, biased: bool, tokens: int
) -> None:
    bias = [random(6, seed=2)] if biased else []
    x = random(tokens, 8, symbols=["T"])
    run(LINEAR, x, W, *bias, ranks=ranks).assert_sound()
    split = run(LINEAR, x.sharded(0, TokenLayout(ranks)), W, *bias, ranks=ranks)
    assert isinstance(split.kind, ValueType)
    assert split.kind.placement == Shard(0, TokenLayout(ranks))
    split.assert_sound()


def test_terms_of_a_sum_pass_through_a_linear() -> None:
    outcome = run(LINEAR, whole_numbers(3, 8).partial(), whole_numbers(6, 8), ranks=3)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == PARTIAL
    outcome.assert_sound(exact=True)


RENAMED = Layout("other", 4, 2, even_runs(4, 2))
REGRAINED = Layout("in", 8, 1, even_runs(8, 2))
SWAPPED = Layout("in", 4, 2, (((2, 4),), ((0, 2),)))
UNEVEN = Layout("in", 4, 2, (((0, 3),), ((3, 4),)))
SHARED = Layout("in", 4, 2, (((0, 3),), ((2, 4),)))


@pytest.mark.parametrize("columns", [RENAMED, REGRAINED, SWAPPED, UNEVEN])
def test_contraction_refuses_layouts_that_differ(columns: Layout) -> None:
    refused("contraction-layout", LINEAR, X.sharded(1, IN), W.sharded(1, columns))


def test_contraction_refuses_one_side_whole() -> None:
    refused("contraction-layout", LINEAR, X.sharded(1, IN), W)
    refused("contraction-layout", LINEAR, X, W.sharded(1, IN))
    refused("contraction-layout", LINEAR, X.sharded(1, IN), W.sharded(0, OUT))
    refused("contraction-layout", LINEAR, X.partial(), W.sharded(1, IN))


def test_contraction_refuses_parts_that_overlap() -> None:
    error = refused("contraction-layout", LINEAR, X.sharded(1, SHARED), W.sharded(1, SHARED))
    assert "more than one rank" in error.got


def test_refuses_a_bias_before_the_sum() -> None:
    error = refused("bias-once", LINEAR, X.sharded(1, IN), W.sharded(1, IN), B)
    assert "after the all_reduce" in error.hint


def test_refuses_a_bias_that_lies_otherwise_than_the_rows() -> None:
    other = Layout("out", 6, 1, (((0, 2),), ((2, 6),)))
    for bias in (B, B.sharded(0, other)):
        refused("bias-layout", LINEAR, X, W.sharded(0, OUT), bias)
    refused("bias-layout", LINEAR, X, W, B.sharded(0, OUT))


def test_refuses_a_bias_that_is_still_to_be_summed() -> None:
    """A partial bias is refused: each rank would add a different term."""
    refused("bias-layout", LINEAR, X, W, B.partial())


def test_refuses_terms_of_a_sum_where_it_is_not_linear() -> None:
    refused("partial-linear", LINEAR, X.partial(), W.sharded(0, OUT))
    refused("partial-linear", LINEAR, X.partial(), W, B)
    refused("partial-weight", LINEAR, X, W.partial())


def test_refuses_tokens_on_ranks_beside_rows_on_ranks() -> None:
    x = random(4, 8, symbols=["T"]).sharded(0, TokenLayout(2))
    error = refused("column-parallel", LINEAR, x, W.sharded(0, OUT))
    assert "gather" in error.hint


def test_refuses_shapes_that_do_not_fit() -> None:
    refused("linear-shape", LINEAR, random(3, 7), W)
    refused("linear-shape", LINEAR, X, random(8))
    refused("linear-shape", LINEAR, X, W, random(5))


def test_refuses_two_dtypes() -> None:
    """Torch does not multiply bf16 by fp32, so the rule refuses it."""
    narrow = torch.zeros(6, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(X.whole, narrow)
    refused("linear-shape", LINEAR, X, operand(narrow))


def test_the_type_is_that_of_the_input_with_other_features() -> None:
    kind = infer(LINEAR, random(3, 8, symbols=["T"]), W)
    assert kind == ValueType(("T", 6), torch.float32, REPLICATE)
