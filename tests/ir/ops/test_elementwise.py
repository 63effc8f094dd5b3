"""Tests of elementwise ops: placements, torch's dtypes, and restrictions on Partial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.ir.ranks import (
    Operand,
    infer,
    operand,
    random,
    refusal,
    refused,
    run,
    sound_or_refused,
    whole_numbers,
)
from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, layouts
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import SIGMOID_GATE, SWIGLU
from tpcompile.ir.types import DISJOINT, PARTIAL, Shard, ValueType

aten = torch.ops.aten
FLOATS = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
UNARY: dict[Any, tuple[Any, ...]] = {
    aten.neg.default: (),
    aten.silu.default: (),
    aten.gelu.default: (),
    aten.relu.default: (),
    aten.tanh.default: (),
    aten.square.default: (),
    aten.rsqrt.default: (),
    aten.pow.Tensor_Scalar: (2,),
    aten.exp.default: (),
    aten.sigmoid.default: (),
    aten.softplus.default: (),
    aten.to.dtype: (torch.bfloat16,),
    aten.mul.Tensor: (0.5,),
    aten.add.Tensor: (1e-6,),
    aten.sub.Tensor: (1e-6,),
    aten.div.Tensor: (3.0,),
}
"""Ops with a single tensor operand, and their other arguments."""

ROUNDED = (
    *(aten.silu.default, aten.gelu.default, aten.tanh.default, aten.exp.default),
    *(aten.sigmoid.default, aten.softplus.default, SWIGLU, SIGMOID_GATE),
)
"""Ops whose last bit depends on an element's position.

Torch computes full vectors and the remainder with different code, which rounds differently.
"""

LEFT = Layout("ffn", 6, 1, even_runs(6, 2))
RIGHT = Layout("ffn", 6, 1, (((0, 2),), ((2, 6),)))


def positive(*shape: int) -> Operand:
    signed = random(*shape)
    return Operand(signed.whole.abs() + 0.5, signed.kind)


@pytest.mark.parametrize("op", UNARY, ids=str)
@EXAMPLES
@given(data=st.data(), ranks=RANKS)
def test_one_operand_keeps_its_placement(op: Any, data: st.DataObject, ranks: int) -> None:
    layout = data.draw(
        st.one_of(layouts(ranks, overlapping=True), fused_layouts(ranks, overlapping=True))
    )
    dim = data.draw(st.integers(0, 1))
    x = positive(*((layout.size, 3) if dim == 0 else (3, layout.size))).sharded(dim, layout)
    outcome = run(op, x, *UNARY[op], ranks=ranks)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == Shard(dim, layout)
    outcome.assert_sound(exact=op not in ROUNDED)


@pytest.mark.parametrize(
    "op",
    [
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(SWIGLU, SIGMOID_GATE),
    ],
    ids=str,
)
@EXAMPLES
@given(data=st.data(), ranks=RANKS)
def test_two_operands_alike_keep_their_placement(op: Any, data: st.DataObject, ranks: int) -> None:
    layout = data.draw(
        st.one_of(layouts(ranks, overlapping=True), fused_layouts(ranks, overlapping=True))
    )
    x = random(3, layout.size).sharded(1, layout)
    y = random(3, layout.size, seed=1).sharded(1, layout)
    run(op, x, y, ranks=ranks).assert_sound(exact=op not in ROUNDED)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor], ids=str)
@EXAMPLES
@given(data=st.data(), ranks=RANKS)
def test_operands_spread_over_each_other(op: Any, data: st.DataObject, ranks: int) -> None:
    """Shapes and placements that the rule accepts give torch's result."""
    layout = data.draw(layouts(ranks, overlapping=True))
    shape = (layout.size, 2, layout.size)
    dim = data.draw(st.integers(0, 2))
    operands = []
    for seed in range(2):
        mask = [data.draw(st.booleans()) for _ in shape]
        extents = [extent if keep else 1 for extent, keep in zip(shape, mask, strict=True)]
        drop = data.draw(st.integers(0, 2)) if not any(mask[:2]) else 0
        x = random(*extents[drop:], seed=seed)
        place = dim - drop
        if place >= 0 and x.kind.shape[place] == layout.size and data.draw(st.booleans()):
            x = x.sharded(place, layout)
        operands.append(x)
    rule = refusal(op, *operands)
    assert rule in (None, "same-layout")
    if rule is None:
        run(op, *operands, ranks=ranks).assert_sound(exact=True)


@EXAMPLES
@given(RANKS, st.integers(1, 9))
def test_tokens_on_ranks_stay_there(ranks: int, tokens: int) -> None:
    x, y = (
        random(tokens, 4, symbols=["T"], seed=seed).sharded(0, TokenLayout(ranks))
        for seed in range(2)
    )
    run(aten.add.Tensor, x, y, ranks=ranks).assert_sound(exact=True)
    run(aten.mul.Tensor, x, random(4), ranks=ranks).assert_sound(exact=True)


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (aten.neg.default, ()),
        (aten.mul.Tensor, (2.0,)),
        (aten.div.Tensor, (2.0,)),
        (aten.add.Tensor, None),
        (aten.sub.Tensor, None),
    ],
    ids=str,
)
def test_terms_of_a_sum_pass_through_what_is_linear(op: Any, operands: Any) -> None:
    x = whole_numbers(3, 4).partial()
    arguments = [whole_numbers(3, 4, seed=1).partial()] if operands is None else operands
    outcome = run(op, x, *arguments, ranks=3)
    assert isinstance(outcome.kind, ValueType)
    assert outcome.kind.placement == PARTIAL
    outcome.assert_sound(exact=True)


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (aten.silu.default, ()),
        (aten.gelu.default, ()),
        (aten.relu.default, ()),
        (aten.tanh.default, ()),
        (aten.square.default, ()),
        (aten.rsqrt.default, ()),
        (aten.pow.Tensor_Scalar, (2,)),
        (aten.add.Tensor, (1.0,)),
        (aten.add.Tensor, (random(3, 6),)),
        (aten.mul.Tensor, (random(3, 6).partial(),)),
        (aten.sub.Tensor, (1.0,)),
        (aten.div.Tensor, (random(3, 6).partial(),)),
        (SWIGLU, (random(3, 6),)),
        (SWIGLU, (random(3, 6).partial(),)),
    ],
    ids=str,
)
def test_refuses_a_sum_not_taken(op: Any, operands: tuple[Any, ...]) -> None:
    error = refused("partial-nonlinear", op, random(3, 6).partial(), *operands)
    assert "all_reduce" in error.hint


def test_refuses_a_sum_not_taken_on_either_side() -> None:
    refused("partial-nonlinear", aten.add.Tensor, random(3, 6), random(3, 6).partial())


def test_refuses_to_round_the_terms_of_a_sum() -> None:
    terms = random(3, 6).partial()
    error = refused("rounded-terms", aten.to.dtype, terms, torch.bfloat16)
    assert "put the cast after the collective" in error.hint
    widened = run(aten.to.dtype, terms, torch.float64, ranks=3)
    assert widened.kind == ValueType((3, 6), torch.float64, PARTIAL)
    widened.assert_sound()
    disjoint = replace(terms, kind=terms.kind.placed(DISJOINT))
    assert infer(aten.to.dtype, disjoint, torch.bfloat16).placement == DISJOINT


def test_a_factor_of_each_term_of_a_sum() -> None:
    """Ranks multiply their terms by the same value, for example by a gate per token."""
    terms, gate = random(3, 6).partial(), random(3, 1)
    for operands in ((terms, gate), (gate, terms)):
        outcome = run(aten.mul.Tensor, *operands, ranks=3)
        assert outcome.kind.placement == PARTIAL
        outcome.assert_sound()


def test_a_sum_divided_by_what_every_rank_has() -> None:
    """A quotient of a sum is a sum of quotients; a quotient by a sum is not."""
    terms, divisor = random(3, 6).partial(), positive(3, 1)
    outcome = run(aten.div.Tensor, terms, divisor, ranks=3)
    assert outcome.kind.placement == PARTIAL
    outcome.assert_sound()
    refused("partial-nonlinear", aten.div.Tensor, divisor, terms)
    refused("floating", aten.div.Tensor, operand(torch.arange(3)), 2)


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, SWIGLU], ids=str)
def test_refuses_layouts_that_differ(op: Any) -> None:
    x = random(6, 6)
    for first, second in (
        (x.sharded(1, LEFT), x.sharded(1, RIGHT)),
        (x.sharded(1, LEFT), x.sharded(1, Layout("heads", 6, 1, LEFT.parts))),
        (x.sharded(1, LEFT), x.sharded(0, LEFT)),
        (x.sharded(1, LEFT), x),
        (x, x.sharded(1, LEFT)),
    ):
        refused("same-layout", op, first, second)


def test_refuses_shapes_that_do_not_fit() -> None:
    refused("broadcast", aten.add.Tensor, random(3, 4), random(3, 5))
    refused("broadcast", aten.add.Tensor, random(3, 4, symbols=["T"]), random(3, 4))
    refused("broadcast", aten.add.Tensor, random(3, 4).partial(), random(4).partial())
    refused("swiglu", SWIGLU, random(3, 4), random(1, 4))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_either_gelu_is_torch_s(approximate: str) -> None:
    x = random(5, 6)
    outcome = run(aten.gelu.default, x.sharded(1, LEFT), ranks=2, approximate=approximate)
    outcome.assert_sound()
    assert torch.equal(outcome.expected, functional.gelu(x.whole, approximate=approximate))


def test_refuses_another_gelu() -> None:
    refused("gelu", aten.gelu.default, random(3), approximate="fast")


@pytest.mark.parametrize("op", [aten.gelu.default, aten.relu.default, aten.square.default], ids=str)
def test_refuses_an_activation_of_whole_numbers(op: Any) -> None:
    refused("floating", op, operand(torch.arange(4)))


def test_refuses_a_scaled_sum() -> None:
    refused("plain-add", aten.add.Tensor, random(3), random(3), alpha=2)


@EXAMPLES
@given(FLOATS, FLOATS, st.booleans())
def test_two_dtypes_become_what_torch_makes_of_them(
    first: torch.dtype, second: torch.dtype, scalar: bool
) -> None:
    x = operand(torch.ones(3, dtype=first))
    y = operand(torch.ones((), dtype=second) if scalar else torch.ones(3, dtype=second))
    for op in (aten.add.Tensor, aten.mul.Tensor):
        sound_or_refused(op, x, y)


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.add.Tensor, aten.pow.Tensor_Scalar], ids=str)
def test_whole_numbers_and_a_fraction_become_what_torch_makes_of_them(op: Any) -> None:
    sound_or_refused(op, operand(torch.arange(1, 4)), 0.5)


def test_swiglu_is_hugging_face_s_product() -> None:
    gate, up = random(5, 7).whole, random(5, 7, seed=1).whole
    for dtype in (torch.float32, torch.bfloat16):
        g, u = gate.to(dtype), up.to(dtype)
        assert torch.equal(SWIGLU(g, u), functional.silu(g) * u)


def test_an_output_gate() -> None:
    """The gate of another head, of another shape or dtype, or summed later is refused."""
    x, gate = random(3, 6), random(3, 6, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        values, gates = x.whole.to(dtype), gate.whole.to(dtype)
        assert torch.equal(SIGMOID_GATE(values, gates), values * torch.sigmoid(gates))
    refused("sigmoid-gate", SIGMOID_GATE, x.sharded(1, LEFT), gate.sharded(1, RIGHT))
    refused("sigmoid-gate", SIGMOID_GATE, x.sharded(1, LEFT), gate)
    refused("sigmoid-gate", SIGMOID_GATE, x, random(3, 1))
    refused("sigmoid-gate", SIGMOID_GATE, x, operand(gate.whole.bfloat16()))
    refused("partial-nonlinear", SIGMOID_GATE, x.partial(), gate.partial())


def test_softplus_and_casts() -> None:
    refused("softplus", aten.softplus.default, random(3, 6), 2)
    like = operand(random(2, 5).whole.bfloat16())
    outcome = run(aten.type_as.default, random(3, 6).sharded(1, LEFT), like, ranks=2)
    outcome.assert_sound(exact=True)
    assert outcome.kind == ValueType((3, 6), torch.bfloat16, Shard(1, LEFT))
    for op in (aten.exp.default, aten.sigmoid.default, aten.softplus.default):
        refused("partial-nonlinear", op, random(3, 6).partial())
