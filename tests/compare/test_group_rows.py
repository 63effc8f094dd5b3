"""Comparing the sides of a step reports which values differ, where, and on which side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tpcompile.compare.comparison import Comparison
from tpcompile.compare.group_rows import (
    LOGITS,
    TOKEN,
    GroupRow,
    Step,
    best_tokens,
    compare_sides,
)
from tpcompile.compare.groups import Group, Key, Pieces, Side
from tpcompile.ir.layout import Layout

HEADS = Layout("q_heads", 3, 4, (((0, 1),), ((1, 3),)))
Q = Group("q_rotated", 0, 2, 12, HEADS, "head", 4)
CACHED = Group("k_cached", 0, 5, 4, None, "kv head", 4, lengths=(2, 3))
LSE = Group("partial_lse", 0, 2, 6, HEADS.with_grain(2), "head", 2, spans=2)
VALUES = Group("partial_values", 0, 2, 24, HEADS.with_grain(8), "head", 8, spans=2)
SWIGLU = Group("swiglu", 0, 2, 12, HEADS)
GROUPS = (
    Q,
    CACHED,
    LSE,
    VALUES,
    SWIGLU,
    Group("logits", None, 2, 12, HEADS),
    Group("token", None, 2, 1),
)


def values_of(group: Group, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(GROUPS.index(group))
    values = torch.randn((group.rows, group.columns), generator=generator).to(dtype)
    if group is LSE:
        values[0, 2] = -torch.inf  # an empty span
    return values


def side_of(name: str, ranks: int, dtype: torch.dtype = torch.float32, **changed: float) -> Side:
    """Return the values of a step; add each given offset to the last element of its group."""
    groups = GROUPS if ranks > 1 else [replace(group, layout=None) for group in GROUPS]
    pieces = Pieces(name, groups, ranks)
    tensors = {group.key: values_of(group, dtype) for group in GROUPS}
    tensors[TOKEN] = best_tokens(tensors[LOGITS])
    for group, offset in changed.items():
        key: Key = next(known.key for known in GROUPS if known.name == group)
        tensors[key] = tensors[key].clone()
        tensors[key][-1, -1] += offset
    for key, values in tensors.items():
        pieces.deal(key, values, f"who makes {key[0]}")
    return pieces.side()


def rows_of(**changed: float) -> list[GroupRow]:
    step = Step(GROUPS, side_of("eager", 1))
    return list(compare_sides(step, [side_of("program", 2, **changed)]))


def first_of(rows: list[GroupRow]) -> GroupRow:
    return next(row for row in rows if not row.ok)


def test_sides_that_are_the_same() -> None:
    rows = rows_of()
    assert [row.node for row in rows] == [group.name for group in GROUPS]
    assert all(row.ok and not row.by and row.side == "program" for row in rows)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("q_rotated", {"heads": (2,), "spans": (), "rows": (3, 4), "ranks": (1,)}),
        ("k_cached", {"heads": (0,), "spans": (), "rows": (3, 4), "ranks": ()}),
        ("partial_lse", {"heads": (2,), "spans": (1,), "rows": (0, 1), "ranks": (1,)}),
        ("partial_values", {"heads": (2,), "spans": (1,), "rows": (3, 4), "ranks": (1,)}),
        ("swiglu", {"heads": (), "spans": (), "rows": (11, 12), "ranks": (1,)}),
    ],
)
@pytest.mark.parametrize("offset", [0.1, torch.nan])
def test_it_is_said_where_a_value_is_off(
    name: str, place: dict[str, tuple[int, ...]], offset: float
) -> None:
    first = first_of(rows_of(**{name: offset}))
    assert (first.node, first.layer, first.sequences) == (name, 0, (1,))
    assert {key: getattr(first, key) for key in place} == place
    assert first.by == (f"who makes {name}",)
    assert f"computed by who makes {name}" in first.place


def test_the_place_is_told_to_a_reader() -> None:
    rows = tuple(rows_of(partial_values=0.1))
    table = Comparison(rows, True, {}).table()
    assert "(sequence 1, head 2, span 1, rows 3 to 4; computed by who makes partial_v" in table


def test_an_empty_span_must_be_empty_on_both_sides() -> None:
    step = Step(GROUPS, side_of("eager", 1))
    side = side_of("program", 2)
    side.values[LSE.key][0, 2] = 0.0
    first = first_of(list(compare_sides(step, [side])))
    assert (first.node, first.sequences, first.heads, first.spans) == (
        "partial_lse",
        (0,),
        (1,),
        (0,),
    )
    side.values[LSE.key][0, 2:4] = -torch.inf
    assert first_of(list(compare_sides(step, [side]))).problem == "infinity"


def spoilt_token(change: Callable[[torch.Tensor], torch.Tensor]) -> GroupRow:
    step = Step(GROUPS, side_of("eager", 1))
    side = side_of("program", 2)
    side.values[TOKEN] = change(side.values[LOGITS])
    return first_of(list(compare_sides(step, [side])))


def test_a_token_must_be_the_best_of_the_sides_own_logits() -> None:
    first = spoilt_token(lambda logits: logits.argmin(1, keepdim=True))
    assert "among the side's own highest logits" in first.problem
    assert first.sequences == (0, 1)


def test_what_is_no_token_is_said() -> None:
    assert (
        spoilt_token(lambda logits: torch.tensor([[-1], [99]])).problem
        == "invalid tokens: [-1, 99]"
    )


def test_of_equal_logits_the_first_is_best() -> None:
    assert best_tokens(torch.tensor([[1.0, 3.0, 2.0, 3.0]])).tolist() == [[1]]


def test_a_problem_of_how_values_were_reported_is_a_divergence() -> None:
    eager, side = side_of("eager", 1), side_of("program", 2)
    side.problems[Q.key] = "missing on rank 1"
    eager.problems[LSE.key] = "reported with different bits: a; b"
    rows = {row.node: row for row in compare_sides(Step(GROUPS, eager), [side])}
    assert (rows["q_rotated"].ok, rows["q_rotated"].problem) == (False, "missing on rank 1")
    assert rows["partial_lse"].problem == "in eager: reported with different bits: a; b"


def test_what_one_side_alone_has_is_a_divergence() -> None:
    side = side_of("program", 2)
    side.unknown["k_twisted", 1] = "somebody"
    *rows, last = compare_sides(Step(GROUPS, side_of("eager", 1)), [side])
    assert all(row.ok for row in rows)
    assert (last.node, last.layer, last.ok) == ("k_twisted", 1, False)
    assert last.problem == "no other side has it; reported by somebody"


def test_bf16_is_judged_beside_fp32() -> None:
    """Rounding to bf16 passes, and a mistake is still reported."""
    step = Step(GROUPS, side_of("eager", 1, torch.bfloat16), side_of("exact", 1))
    good = side_of("program", 2, torch.bfloat16)
    rows = list(compare_sides(step, [good]))
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    assert all(row.beside_fp32 for row in rows if row.node != "token")
    bad = side_of("program", 2, torch.bfloat16, q_rotated=0.1)
    first = first_of(list(compare_sides(step, [bad])))
    assert (first.node, first.heads, first.rows) == ("q_rotated", (2,), (3, 4))
