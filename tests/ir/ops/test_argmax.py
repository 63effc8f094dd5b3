"""The argmax over split columns equals torch's argmax over the whole row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import deal, operand, random, refused, run
from tests.ir.strategies import EXAMPLES, RANKS, layouts, runs
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ARGMAX, SPECS
from tpcompile.ir.ops.argmax import PAIR_BYTES, best_of, first_column, local_argmax
from tpcompile.ir.types import ValueType

INFINITY, NAN = float("inf"), float("nan")
FEW = st.sampled_from([0.0, 1.0, 1.0, 2.0, -1.5, -INFINITY, INFINITY, NAN])
"""A few values, so that rows have ties within and across ranks."""


@st.composite
def rows(draw: st.DrawFn, columns: int) -> torch.Tensor:
    row = st.lists(FEW, min_size=columns, max_size=columns)
    values = draw(st.lists(row, min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return torch.tensor(values, dtype=dtype)


@EXAMPLES
@given(st.data(), RANKS, st.integers(0, 5))
def test_ranks_find_what_torch_finds_in_the_whole(
    data: st.DataObject, ranks: int, more: int
) -> None:
    """Ties go to the lowest id, NaN wins, and rows of minus infinity have a result too."""
    logits = operand(data.draw(rows(ranks + more)))
    order = data.draw(st.permutations(data.draw(runs(ranks + more, ranks))))
    split = logits.sharded(1, Layout("vocab", ranks + more, 1, tuple(order)))
    outcome = run(ARGMAX, split, ranks=ranks)
    assert isinstance(outcome.kind, ValueType)
    assert torch.equal(outcome.expected, logits.whole.argmax(-1))
    outcome.assert_sound(exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_real_vocabulary(dtype: torch.dtype, ranks: int) -> None:
    """bf16 logits have many ties, since there are only 256 values between powers of two."""
    logits = operand(random(9, 1009).whole.to(dtype))
    layout = Layout("vocab", 1009, 1, even_runs(1009, ranks))
    run(ARGMAX, logits.sharded(1, layout), ranks=ranks).assert_sound(exact=True)
    run(ARGMAX, logits, ranks=ranks).assert_sound(exact=True)


def test_a_rank_without_columns_never_wins() -> None:
    """A rank without columns loses even against minus infinity, since its id is the maximum."""
    full = torch.tensor([[-INFINITY, -INFINITY], [-3.0, -2.0]])
    pairs = [local_argmax(full[:, :0], 0), local_argmax(full, 4), local_argmax(full[:, :0], 6)]
    values, ids = (torch.stack(side) for side in zip(*pairs, strict=True))
    assert ids.dtype == torch.long and values.dtype == full.dtype
    assert best_of(values, ids).tolist() == [4, 5]


def test_a_padded_column_never_wins_a_tie() -> None:
    """A padded column loses ties, since its id is larger than any real one."""
    logits = torch.full((1, 8), -INFINITY)
    pairs = [local_argmax(logits[:, start : start + 4], start) for start in (4, 0)]
    assert best_of(*(torch.stack(side) for side in zip(*pairs, strict=True))).tolist() == [0]


def test_ids_count_the_columns_of_other_ranks() -> None:
    layout = Layout("vocab", 5, 1, (((3, 5),), ((0, 1),), ((1, 3),)))
    kind = ValueType(("R", 5), torch.float32).sharded(1, layout)
    assert [first_column(kind, rank) for rank in range(3)] == [3, 0, 1]
    assert first_column(ValueType(("R", 5), torch.float32), 2) == 0


def test_every_rank_has_a_copy_of_its_own() -> None:
    split = random(3, 4).sharded(1, Layout("vocab", 4, 1, even_runs(4, 2)))
    across = SPECS[ARGMAX].across
    assert across is not None
    first, second = across(deal(split, 2), split.kind, ValueType((3,), torch.long))
    assert first.data_ptr() != second.data_ptr()


def test_at_most_64_bytes_a_rank_and_row_cross() -> None:
    cost = SPECS[ARGMAX].cost
    result = ValueType(("R",), torch.long)
    kind = ValueType(("R", 151_936), torch.bfloat16)
    assert PAIR_BYTES <= 64
    for ranks in (2, 4, 7):
        split = kind.sharded(1, Layout("vocab", 151_936, 1, even_runs(151_936, ranks)))
        split_cost = cost(result, [split], 0)
        assert split_cost.wire_bytes == ranks * PAIR_BYTES
        assert split_cost.memory_bytes == 2 * split.placement.layout.extent(0)  # type: ignore[union-attr]
    assert cost(result, [kind], 0).wire_bytes == 0


LOGITS = random(4, 6)
HALVES = Layout("vocab", 6, 1, even_runs(6, 2))


def test_refuses_a_sum_not_taken() -> None:
    refused("partial-nonlinear", ARGMAX, LOGITS.partial())


def test_refuses_rows_on_some_ranks() -> None:
    tokens = random(4, 6, symbols=["R"]).sharded(0, TokenLayout(2, "R"))
    error = refused("argmax", ARGMAX, tokens)
    assert "every row" in error.expected
    refused("argmax", ARGMAX, LOGITS.sharded(0, Layout("rows", 4, 1, even_runs(4, 2))))


def test_refuses_columns_whose_ids_are_no_run() -> None:
    """Ids are offsets from a rank's first column, so its columns must be contiguous."""
    scattered = replace(HALVES, parts=(((0, 2), (4, 6)), ((2, 4),)))
    shared = replace(HALVES, parts=(((0, 4),), ((2, 6),)))
    fused = FusedLayout((Layout("a", 2, 1, even_runs(2, 2)), Layout("b", 4, 1, even_runs(4, 2))))
    for layout in (scattered, shared, fused):
        error = refused("argmax", ARGMAX, LOGITS.sharded(1, layout))
        assert "one run of the vocabulary" in error.expected


@EXAMPLES
@given(st.data(), RANKS)
def test_any_layout_that_the_rule_takes_is_sound(data: st.DataObject, ranks: int) -> None:
    layout = data.draw(layouts(ranks, overlapping=data.draw(st.booleans())))
    logits = random(3, layout.size).sharded(1, layout)
    one_run = all(len(part) == 1 for part in layout.parts) and not layout.overlap()
    if one_run:
        run(ARGMAX, logits, ranks=ranks).assert_sound(exact=True)
    else:
        refused("argmax", ARGMAX, logits)


def test_refuses_logits_without_rows() -> None:
    refused("argmax", ARGMAX, random(6))
    refused("argmax", ARGMAX, random(1, 4, 6))
