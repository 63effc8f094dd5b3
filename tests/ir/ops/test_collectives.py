"""Collectives restore any placement to the whole, sum in trees, and count each term once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import Operand, infer, random, refused, run, whole_numbers
from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, layouts, runs
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDISTRIBUTE, REDUCE_SCATTER
from tpcompile.ir.ops.collectives import gather, to_whole, tree_sum
from tpcompile.ir.types import DISJOINT, PARTIAL, REPLICATE, Shard, ValueType

AXIS = Layout("axis", 6, 1, even_runs(6, 2))
X = torch.zeros(6, 6)
SHARED = Layout("axis", 6, 1, (((0, 4),), ((3, 6),)))


@EXAMPLES
@given(st.data(), RANKS, st.integers(0, 1))
def test_a_whole_value_from_any_parts(data: st.DataObject, ranks: int, dim: int) -> None:
    layout = data.draw(st.one_of(layouts(ranks), fused_layouts(ranks)))
    _assert_whole(dim, layout, REDISTRIBUTE)


@EXAMPLES
@given(st.data(), RANKS, st.integers(0, 1), st.integers(1, 3))
def test_gathered_runs_are_the_whole(data: st.DataObject, ranks: int, dim: int, grain: int) -> None:
    units = data.draw(st.integers(ranks, 9))
    layout = Layout("axis", units, grain, data.draw(runs(units, ranks)))
    for arguments in ((dim,), (dim - 2,)):
        _assert_whole(dim, layout, ALL_GATHER, *arguments)


def _assert_whole(dim: int, layout: Layout | FusedLayout, target: object, *arguments: int) -> None:
    x = random(*((layout.size, 3) if dim == 0 else (3, layout.size))).sharded(dim, layout)
    outcome = run(target, x, *arguments, ranks=layout.ranks)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == REPLICATE
    outcome.assert_sound(exact=True)


def test_refuses_parts_that_do_not_lie_in_rank_order() -> None:
    """A gather concatenates in rank order, which is wrong for swapped parts and for fused axes."""
    swapped = Layout("axis", 6, 1, tuple(reversed(even_runs(6, 2))))
    refused("all-gather", ALL_GATHER, random(6, 3).sharded(0, swapped), 0)
    fused = FusedLayout((AXIS, AXIS))
    refused("all-gather", ALL_GATHER, random(12, 3).sharded(0, fused), 0)


@EXAMPLES
@given(RANKS, st.integers(1, 9))
def test_gathered_tokens_are_the_tokens(ranks: int, tokens: int) -> None:
    """Gathering tokens gives all tokens, also if some ranks have none."""
    x = random(tokens, 3, symbols=["T"]).sharded(0, TokenLayout(ranks))
    run(ALL_GATHER, x, 0, ranks=ranks).assert_sound(exact=True)
    run(REDISTRIBUTE, x, ranks=ranks).assert_sound(exact=True)


@EXAMPLES
@given(RANKS, st.integers(1, 9))
def test_summed_terms_are_the_value(ranks: int, tokens: int) -> None:
    x = whole_numbers(tokens, 3, symbols=["T"]).partial()
    for target in (ALL_REDUCE, REDISTRIBUTE):
        outcome = run(target, x, ranks=ranks)
        assert isinstance(outcome.kind, ValueType)
        assert outcome.kind.placement == REPLICATE
        outcome.assert_sound(exact=True)
    scattered = run(REDUCE_SCATTER, x, ranks, ranks=ranks)
    assert isinstance(scattered.kind, ValueType)
    assert scattered.kind.placement == Shard(0, TokenLayout(ranks))
    scattered.assert_sound(exact=True)


@pytest.mark.parametrize("target", [ALL_REDUCE, REDISTRIBUTE, REDUCE_SCATTER])
def test_terms_are_added_in_fp32(target: Any) -> None:
    """A sum in 16 bits is refused, unless at most one of its terms is not zero."""
    ranks = (2,) if target is REDUCE_SCATTER else ()
    wide = ValueType(("T", 6), torch.float32, PARTIAL)
    narrow = ValueType(("T", 6), torch.bfloat16, PARTIAL)
    for terms, dtype in ((narrow, None), (narrow, torch.float16), (wide, torch.bfloat16)):
        error = refused("sum-dtype", target, Operand(X, terms), *ranks, dtype)
        assert str(terms) in error.got and error.expected == "a sum in f32"
        assert "dtype=torch.float32" in error.hint
        disjoint = Operand(X, terms.placed(DISJOINT))
        assert infer(target, disjoint, *ranks, dtype).dtype == (dtype or terms.dtype)
    for terms in (narrow, wide):
        assert infer(target, Operand(X, terms), *ranks, torch.float32).dtype == torch.float32


@EXAMPLES
@given(st.data(), RANKS)
def test_shared_parts_gather_by_their_type(data: st.DataObject, ranks: int) -> None:
    layout = data.draw(fused_layouts(ranks, overlapping=True))
    x = random(2, layout.size).sharded(1, layout)
    run(REDISTRIBUTE, x, ranks=ranks).assert_sound(exact=True)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_sums_are_trees(ranks: int) -> None:
    """Sums add neighbours first: for powers of two, they are the sum of the sums of both halves."""
    values = list(random(ranks, 5).whole)
    total = tree_sum(values)
    torch.testing.assert_close(total, torch.stack(values).sum(0))
    if ranks in (2, 4, 8):
        half = ranks // 2
        assert torch.equal(total, tree_sum(values[:half]) + tree_sum(values[half:]))


def test_collectives_leave_their_operands_alone() -> None:
    """Each rank receives its own tensor, even on one rank."""
    value = random(3, 2).whole
    for target in COLLECTIVES:
        arguments = (value, *((0,) if target is ALL_GATHER else (1,) * (target is REDUCE_SCATTER)))
        output = target(*arguments)
        assert torch.equal(output, value) and output.data_ptr() != value.data_ptr()


def test_refuses_to_sum_what_is_no_sum() -> None:
    for x in (random(6, 2), random(6, 2).sharded(0, AXIS)):
        error = refused("all-reduce", ALL_REDUCE, x)
        assert "tp times" in error.hint
        refused("reduce-scatter", REDUCE_SCATTER, x, 2)


def test_refuses_to_gather_what_is_whole() -> None:
    refused("all-gather", ALL_GATHER, random(6, 2), 0)
    refused("all-gather", ALL_GATHER, random(6, 2).partial(), 0)
    refused("all-gather", ALL_GATHER, random(6, 2).sharded(0, AXIS), 1)


def test_refuses_to_gather_parts_that_overlap() -> None:
    error = refused("all-gather", ALL_GATHER, random(6, 2).sharded(0, SHARED), 0)
    assert "more than one rank" in error.got


def test_refuses_to_scatter_what_is_no_tokens() -> None:
    refused("reduce-scatter", REDUCE_SCATTER, random(6, 2).partial(), 2)


def test_whole_of_every_placement() -> None:
    x = whole_numbers(6, 2)
    kind = x.kind
    assert torch.equal(to_whole([x.whole] * 2, kind), x.whole)
    halves = [x.whole - 1, torch.ones_like(x.whole)]
    assert torch.equal(to_whole(halves, kind.placed(PARTIAL)), x.whole)
    parts = [x.whole[:4], x.whole[3:]]
    assert torch.equal(gather(parts, kind.sharded(0, SHARED)), x.whole)
