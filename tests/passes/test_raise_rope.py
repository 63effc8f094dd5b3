"""Rotation is recognised as Hugging Face writes it: by halves, with cos and sin in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder, refusal
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import ROPE, ROPE_PAIRS
from tpcompile.ir.ops.parts import END
from tpcompile.passes.raise_rope import RaiseRope
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
HEADS, WIDTH = 4, 8
HALF = WIDTH // 2


def rope_graph(
    *,
    cos_first: bool = True,
    middle: tuple[int, int] = (HALF, HALF),
    steps: tuple[int, int] = (1, 1),
    axis: int = 2,
    cat_axis: int = -1,
    end: int = END,
    negated: int = 1,
    other_value: bool = False,
    token_major: bool = False,
    table: int = WIDTH,
    commuted: bool = False,
) -> fx.GraphModule:
    """Return a rotation as Hugging Face writes it, with the requested deviations."""
    builder = GraphBuilder()
    shape = ("T", HEADS, WIDTH) if token_major else (HEADS, "T", WIDTH)
    x = builder.input("x", *shape)
    cos, sin = builder.tables(table)
    if not cos_first:
        cos, sin = sin, cos
    cos, sin = (builder.call(aten.unsqueeze.default, t, int(token_major)) for t in (cos, sin))
    low = builder.call(aten.slice.Tensor, x, axis, 0, middle[0], steps[0])
    high = builder.call(aten.slice.Tensor, x, axis, middle[1], end, steps[1])
    halves = [high, low]
    place = 1 - negated
    halves[place] = builder.call(aten.neg.default, halves[place])
    turned = builder.call(aten.cat.default, halves, cat_axis)
    other = builder.call(aten.neg.default, x) if other_value else x
    terms = [
        builder.call(aten.mul.Tensor, *pair[:: -1 if commuted else 1])
        for pair in ((other, cos), (turned, sin))
    ]
    return builder.done(builder.call(aten.add.Tensor, *terms[:: -1 if commuted else 1]))


@pytest.mark.parametrize("changes", [{}, {"commuted": True}, {"axis": -1}, {"end": WIDTH}], ids=str)
def test_what_is_a_rotation(changes: dict[str, Any]) -> None:
    gm = rope_graph(**changes)
    x, tables = torch.randn(HEADS, 3, WIDTH), torch.randn(2, 3, WIDTH).unbind()
    gm.rotary = _Given(*tables)
    before = gm(x, torch.arange(3))
    assert RaiseRope().apply(gm).matches == 1
    assert check_graph(gm) == []
    assert len(calls(gm, ROPE)) == 1
    gm.recompile()
    assert torch.equal(gm(x, torch.arange(3)), before)


class _Given(torch.nn.Module):
    """Rotary module that returns given tables."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.tables = cos, sin

    def forward(self, positions: torch.Tensor, width: int, dtype: torch.dtype) -> Any:
        return self.tables


NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "cos and sin swapped": (
        {"cos_first": False},
        "cos and sin must be the two tables of one rotary module, in this order",
    ),
    "halves cut elsewhere": ({"middle": (2, 2)}, "the halves must be cut at 4, got 2 and 2"),
    "halves of another size": ({"middle": (6, 6)}, "the halves must be cut at 4, got 6 and 6"),
    "overlapping halves": (
        {"middle": (HALF, 3), "end": WIDTH - 1},
        "the halves must be cut at 4, got 4 and 3",
    ),
    "a half and every other feature": (
        {"middle": (HALF, 1), "steps": (1, 2)},
        "the pattern does not allow step=2",
    ),
    "interleaved": (
        {"middle": (END, 1), "steps": (2, 2)},
        "the pattern does not allow step=2",
    ),
    "halves of the heads": ({"axis": 0, "middle": (2, 2), "cat_axis": 0}, "expected -1, got 0"),
    "the other half negated": ({"negated": 0}, "expected aten.neg, got"),
    "another value rotated": ({"other_value": True}, "x is already bound to"),
    "tokens first": ({"token_major": True}, "expected 0, got 1"),
    "one table for all features": ({"table": 1}, "the table must have shape ("),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    gm = rope_graph(**changes)
    message = refusal(RaiseRope(), gm)
    assert reason in message
    assert "There is no rotation of heads in the graph" in message
    assert not calls(gm, ROPE)


def test_two_dimensions_are_refused() -> None:
    """A value without heads is refused: it matches the pattern, but not the shape."""
    builder = GraphBuilder()
    x = builder.input("x", 1, WIDTH)
    tables = [builder.input(name, WIDTH) for name in ("cos", "sin")]
    cos, sin = (builder.call(aten.unsqueeze.default, table, 0) for table in tables)
    low = builder.call(aten.slice.Tensor, x, 1, 0, HALF, 1)
    high = builder.call(aten.neg.default, builder.call(aten.slice.Tensor, x, 1, HALF, END, 1))
    turned = builder.call(aten.cat.default, [high, low], -1)
    terms = [builder.call(aten.mul.Tensor, *pair) for pair in ((x, cos), (turned, sin))]
    gm = builder.done(builder.call(aten.add.Tensor, *terms))
    assert "x must have shape [heads, T, width], got (1, 8)" in refusal(RaiseRope(), gm)


def test_a_model_without_rotation_is_refused() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "T", WIDTH)
    gm = builder.done(builder.call(aten.add.Tensor, x, x))
    assert "expected aten.mul, got" in refusal(RaiseRope(), gm)


def pairs_graph(
    dtype: torch.dtype = torch.float32,
    *,
    halves: bool = False,
    wide: bool = False,
    late: bool = False,
    first: int = 0,
    cut: int = HALF,
    cos_first: bool = True,
) -> fx.GraphModule:
    """Return a rotation of adjacent elements as GLM, Cohere and Ernie write it.

    With `wide` it is in fp32; `late` casts the turned elements after they are turned. With `cut`,
    fewer columns of the tables are repeated.
    """
    builder = GraphBuilder()
    x = builder.input("x", HEADS, "T", WIDTH, dtype=dtype)
    tables = [builder.call(aten.unsqueeze.default, t, 0) for t in builder.tables(WIDTH)]
    tables = tables if cos_first else tables[::-1]
    if halves:
        columns = [builder.call(aten.slice.Tensor, t, 2, 0, cut) for t in tables]
        tables = [
            builder.call(aten.repeat_interleave.self_int, t, WIDTH // cut, -1) for t in columns
        ]
    straight = builder.call(aten.to.dtype, x, torch.float32) if wide else x
    turning = x if late else straight
    even = builder.call(aten.slice.Tensor, turning, 2, first, END, 2)
    odd = builder.call(aten.slice.Tensor, turning, 2, 1 - first, END, 2)
    parts = [builder.call(aten.neg.default, odd), even]
    turned = builder.call(aten.flatten.using_ints, builder.call(aten.stack.default, parts, -1), -2)
    turned = builder.call(aten.to.dtype, turned, torch.float32) if late else turned
    terms = [
        builder.call(aten.mul.Tensor, *pair)
        for pair in zip((straight, turned), tables, strict=True)
    ]
    total = builder.call(aten.add.Tensor, *terms)
    return builder.done(builder.call(aten.to.dtype, total, dtype) if wide else total)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (torch.float32, {"halves": True}),
        (torch.bfloat16, {"wide": True}),
        (torch.bfloat16, {"wide": True, "late": True, "halves": True}),
    ],
    ids=str,
)
def test_rotations_of_adjacent_elements(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    gm = pairs_graph(dtype, **changes)
    x, tables = torch.randn(HEADS, 3, WIDTH).to(dtype), torch.randn(2, 3, WIDTH).unbind()
    gm.rotary = _Given(*tables)
    before = gm(x, torch.arange(3))
    assert RaiseRope().apply(gm).matches == 1
    assert check_graph(gm) == []
    (rotation,) = calls(gm, ROPE_PAIRS)
    assert rotation.args[3:] == (bool(changes.get("halves")), dtype != torch.float32)
    gm.recompile()
    assert torch.equal(gm(x, torch.arange(3)), before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first": 1}, "argument start: expected"),
        ({"halves": True, "cut": 2}, "expected 2, got 4"),
        ({"cos_first": False}, "cos and sin must be the two tables of one rotary module"),
    ],
    ids=str,
)
def test_near_misses_of_adjacent_elements(changes: dict[str, Any], reason: str) -> None:
    gm = pairs_graph(**changes)
    assert reason in refusal(RaiseRope(), gm)
    assert not calls(gm, ROPE_PAIRS)
