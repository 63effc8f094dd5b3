"""Groups assembled from pieces have no gaps, duplicates or conflicting bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tpcompile.compare.groups import Group, Pieces, Side
from tpcompile.ir.layout import Layout
from tpcompile.ir.ops.rotary import interleave

WHOLE = torch.arange(24.0).view(2, 12)
SHARED = Layout("kv_heads", 3, 4, (((0, 2),), ((1, 3),)))
"""Both ranks hold the middle head."""
KEY = ("k", 1)
GROUP = Group("k", 1, 2, 12, SHARED, "kv head", 4)


def gathered(pieces: Pieces) -> tuple[torch.Tensor, str]:
    side = pieces.side()
    return side.values[KEY], side.problems.get(KEY, "")


def test_ranks_put_together_by_their_layout() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.put(KEY, WHOLE[:, :8], "one", rank=0)
    for row in (0, 1):
        rows = (row, row + 1)
        pieces.put(KEY, WHOLE[rows[0] : rows[1], 4:9], "two", rank=1, rows=rows, columns=(0, 5))
        pieces.put(KEY, WHOLE[rows[0] : rows[1], 9:], "three", rank=1, rows=rows, columns=(5, 8))
    values, problem = gathered(pieces)
    assert torch.equal(values, WHOLE)
    assert not problem
    side = pieces.side()
    names = [side.sources[number] for number in side.source_indices[KEY][1].tolist()]
    assert names == ["one"] * 8 + ["two"] + ["three"] * 3


def test_a_whole_value_is_dealt_and_comes_back() -> None:
    pieces = Pieces("torch module", [GROUP], ranks=2)
    pieces.deal(KEY, WHOLE, "all")
    assert torch.equal(gathered(pieces)[0], WHOLE)
    assert torch.equal(pieces.whole(KEY), WHOLE)
    assert not pieces.side().problems


def test_pairs_that_lie_side_by_side_are_put_where_hugging_face_has_them() -> None:
    group = Group("k", 1, 2, 12, SHARED, "kv head", 4, interleaved=True)
    pieces = Pieces("program", [group], ranks=2)
    pieces.deal(KEY, interleave(WHOLE.view(2, 3, 4)).flatten(1), "all")
    assert torch.equal(gathered(pieces)[0], WHOLE)


def replicas(second: torch.Tensor) -> Side:
    pieces = Pieces("program", [Group("norm", 0, 2, 12, recomputed=True)], ranks=2)
    pieces.put(("norm", 0), WHOLE, "first of rank 0", rank=0)
    pieces.put(("norm", 0), WHOLE, "second of rank 0", rank=0)
    pieces.put(("norm", 0), second, "first of rank 1", rank=1)
    return pieces.side()


def test_what_is_recomputed_is_there_twice_with_the_same_bits() -> None:
    assert not replicas(WHOLE.clone()).problems


@pytest.mark.parametrize("columns", [(0, 8), (3, 8), (7, 8)])
def test_twice_from_one_rank_is_a_problem_with_the_same_bits_too(columns: tuple[int, int]) -> None:
    """A rank may report an element once, but several ranks may report the same element."""
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.put(KEY, WHOLE[:, :8], "one of rank 0", rank=0)
    pieces.put(KEY, WHOLE[:, 4:], "one of rank 1", rank=1)
    assert not gathered(pieces)[1]
    pieces.put(KEY, WHOLE[1:, slice(*columns)], "two", rank=0, rows=(1, 2), columns=columns)
    values, problem = gathered(pieces)
    assert torch.equal(values, WHOLE)
    assert problem == "reported twice by one rank: one of rank 0; two"


def test_twice_from_one_source_is_twice() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.deal(KEY, WHOLE, "all")
    pieces.put(KEY, WHOLE[:, 4:], "all", rank=1)
    assert gathered(pieces)[1] == "reported twice by one rank: all; all"


@pytest.mark.parametrize("other", [WHOLE + 1, WHOLE.where(WHOLE != 0, -0.0)])
def test_ranks_that_differ_in_a_bit_are_named(other: torch.Tensor) -> None:
    problem = replicas(other).problems["norm", 0]
    assert problem == "reported with different bits: first of rank 0; first of rank 1"


def test_two_instructions_that_differ_are_named() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.deal(KEY, WHOLE, "all")
    pieces.put(KEY, WHOLE[:1, 5:6] + 1, "again", rank=1, rows=(0, 1), columns=(1, 2))
    assert gathered(pieces)[1] == "reported with different bits: all; again"


def test_a_shared_head_must_be_the_same_on_all_ranks() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.put(KEY, WHOLE[:, :8], "one", rank=0)
    pieces.put(KEY, WHOLE[:, 4:] + 1, "other", rank=1)
    assert gathered(pieces)[1] == "reported with different bits: one; other"


def test_not_a_number_is_the_same_as_itself() -> None:
    nothing = torch.full_like(WHOLE, torch.nan)
    pieces = Pieces("program", [replace(GROUP, recomputed=True)], ranks=2)
    pieces.deal(KEY, nothing, "one")
    pieces.deal(KEY, nothing, "other")
    assert not gathered(pieces)[1]


def test_what_a_rank_lacks_is_said_even_if_another_has_it() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.put(KEY, WHOLE[:, :8], "one", rank=0)
    pieces.put(KEY, WHOLE[:, 6:], "other", rank=1, columns=(2, 8))
    values, problem = gathered(pieces)
    assert torch.equal(values, WHOLE)
    assert problem == "missing on rank 1: columns 0 to 2 of 8"


def test_a_value_that_nobody_reports_is_missing() -> None:
    values, problem = gathered(Pieces("program", [GROUP], ranks=2))
    assert bool(values.isnan().all())
    assert problem == "missing on rank 0"


@pytest.mark.parametrize(
    ("columns", "shape", "problem"),
    [
        ((6, 9), (2, 3), "reports columns 6 to 9 of 8"),
        ((0, 4), (2, 3), "reports shape (2, 3), expected (2, 4)"),
    ],
)
def test_a_piece_that_does_not_fit(
    columns: tuple[int, int], shape: tuple[int, int], problem: str
) -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.put(KEY, torch.zeros(shape), "it", columns=columns)
    assert gathered(pieces)[1] == f"it {problem}"


def test_pieces_of_one_value_have_one_dtype() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.deal(KEY, WHOLE, "one")
    pieces.deal(KEY, WHOLE.bfloat16(), "other")
    assert gathered(pieces)[1] == "other reports torch.bfloat16, others report torch.float32"


def test_what_no_other_side_has_is_kept_apart() -> None:
    pieces = Pieces("program", [GROUP], ranks=2)
    pieces.deal(KEY, WHOLE, "one")
    pieces.put(("k", 2), WHOLE, "two")
    assert pieces.side().unknown == {("k", 2): "two"}


def test_rows_that_are_tokens_belong_to_sequences() -> None:
    group = Group("k_cached", 0, 6, 12, lengths=(1, 3, 2))
    assert [group.sequence_of(row) for row in range(6)] == [0, 1, 1, 1, 2, 2]
    assert Group("k", 0, 3, 12).sequence_of(2) == 2
