"""Tests of the embedding, whole and split by vocabulary into runs of any length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.ir.ranks import operand, random, refused, run
from tests.ir.strategies import EXAMPLES, RANKS, runs
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.ops import EMBEDDING, VOCAB_EMBEDDING
from tpcompile.ir.types import DISJOINT, REPLICATE, ValueType

TABLE = random(10, 4)
IDS = operand(torch.tensor([0, 9, 3, 3, 7]), ["T"])
VOCAB = Layout("vocab", 10, 1, even_runs(10, 3))


@EXAMPLES
@given(st.data(), RANKS, st.integers(1, 3))
def test_rows_on_ranks_are_the_rows_of_the_table(
    data: st.DataObject, ranks: int, grain: int
) -> None:
    """Uneven shards are sound; ids outside of a rank's rows contribute exactly zero."""
    units = data.draw(st.integers(ranks, ranks + 6))
    layout = Layout("vocab", units, grain, data.draw(runs(units, ranks)))
    ids = operand(torch.arange(layout.size), ["T"])
    table = random(layout.size, 4).sharded(0, layout)
    outcome = run(VOCAB_EMBEDDING, table, ids, ranks=ranks)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == DISJOINT
    outcome.assert_sound(exact=True)
    for rank, value in enumerate(outcome.ranks):
        ((start, stop),) = layout.intervals(rank)
        outside = torch.cat([value[:start], value[stop:]])
        assert torch.equal(outside, torch.zeros_like(outside))


def test_whole_tables() -> None:
    for op in (EMBEDDING, VOCAB_EMBEDDING):
        outcome = run(op, TABLE, IDS, ranks=2)
        assert outcome.kind == ValueType(("T", 4), torch.float32, REPLICATE)
        outcome.assert_sound(exact=True)
        assert torch.equal(outcome.whole(), functional.embedding(IDS.whole, TABLE.whole))


def test_ids_of_any_number_of_dimensions() -> None:
    ids = operand(IDS.whole[None], [None, "T"])
    run(VOCAB_EMBEDDING, TABLE.sharded(0, VOCAB), ids, ranks=3).assert_sound(exact=True)


def test_a_row_that_is_not_finite_stays_with_its_own_tokens() -> None:
    """Infinity in a row does not reach tokens of other rows: zero times infinity is NaN."""
    table = TABLE.whole.clone()
    table[0] = float("inf")
    rows = VOCAB_EMBEDDING(table[:5], torch.tensor([7, 2]), 0)
    assert torch.equal(rows, torch.stack([torch.zeros(4), table[2]]))


def test_refuses_ids_of_the_whole_vocabulary_into_a_part() -> None:
    error = refused("vocab-offset", EMBEDDING, TABLE.sharded(0, VOCAB), IDS)
    assert "tpc.vocab_embedding" in error.hint


def test_refuses_an_offset_in_the_graph() -> None:
    refused("vocab-offset", VOCAB_EMBEDDING, TABLE.sharded(0, VOCAB), IDS, 4)
    refused("vocab-offset", VOCAB_EMBEDDING, TABLE, IDS, 4)


def test_refuses_rows_with_gaps_between() -> None:
    scattered = Layout("vocab", 10, 1, (((0, 2), (5, 10)), ((2, 5),)))
    refused("vocab-offset", VOCAB_EMBEDDING, TABLE.sharded(0, scattered), IDS)
    fused = FusedLayout((Layout("vocab", 10, 1, even_runs(10, 2)),))
    refused("vocab-offset", VOCAB_EMBEDDING, TABLE.sharded(0, fused), IDS)


def test_refuses_rows_that_count_twice() -> None:
    shared = Layout("vocab", 10, 1, (((0, 6),), ((5, 10),)))
    refused("vocab-rows", VOCAB_EMBEDDING, TABLE.sharded(0, shared), IDS)


@pytest.mark.parametrize("op", [EMBEDDING, VOCAB_EMBEDDING], ids=str)
def test_refuses_other_placements(op: object) -> None:
    width = Layout("width", 4, 1, even_runs(4, 2))
    refused("embedding", op, TABLE.sharded(1, width), IDS)
    refused("embedding", op, TABLE.partial(), IDS)
    refused("embedding", op, TABLE, IDS.sharded(0, TokenLayout(2)))
    refused("embedding", op, TABLE, operand(torch.arange(4)).partial())
