"""The rotation gives Hugging Face's bits and requires whole heads and all tokens of the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.cohere import modeling_cohere
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.glm4 import modeling_glm4
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    apply_rotary_pos_emb as partial_rotary_pos_emb,
)

from tests.ir.ranks import infer, operand, random, refused, run, sound_or_refused
from tests.ir.strategies import EXAMPLES, RANKS, layouts
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ROPE, ROPE_PAIRS, ROTARY, SPECS, TABLES
from tpcompile.ir.ops.rotary import interleave, split_halves
from tpcompile.ir.roles import one_head
from tpcompile.ir.types import ValueType

HEADS = Layout("heads", 4, 1, even_runs(4, 2))
WIDTH = Layout("width", 8, 1, even_runs(8, 2))
X, COS, SIN = random(3, 4, 8), random(3, 8, seed=1), random(3, 8, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 16, 64, 80, 96, 128])
def test_the_bits_are_hugging_face_s(width: int, dtype: Any) -> None:
    """Hugging Face uses `[batch, heads, tokens, width]`, our op `[tokens, heads, width]`."""
    q, k = (random(5, 3, width, seed=seed).whole.to(dtype) for seed in range(2))
    cos, sin = (random(5, width, seed=seed).whole.to(dtype) for seed in (2, 3))
    theirs = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    for ours, expected in zip((q, k), theirs, strict=True):
        assert torch.equal(ROPE(ours, cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 16, 80, 128])
def test_interleaved_bits_are_those_of_halves_in_another_order(width: int, dtype: Any) -> None:
    """Interleaving is a permutation that preserves bits, even if both halves of a table differ."""
    x = random(5, 3, width).whole.to(dtype)
    cos, sin = (random(5, width, seed=seed).whole.to(dtype) for seed in (2, 3))
    output = ROPE(interleave(x), cos, sin, True)
    assert torch.equal(output, interleave(ROPE(x, cos, sin)))
    assert torch.equal(split_halves(output), ROPE(x, cos, sin))
    assert width == 2 or not torch.equal(output, ROPE(interleave(x), cos, sin))


def test_interleaved_pairs_are_neighbours_and_pair_i_reads_column_i() -> None:
    """Pairs are neighbours, rotated like complex numbers by the angles of Hugging Face's tables."""
    x, angles = random(5, 3, 8).whole, random(5, 4, seed=1).whole
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    turned = pairs * torch.complex(angles.cos(), angles.sin())[:, None]
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(ROPE(x, cos, sin, interleaved=True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "rotated"), [(16, 4), (16, 8), (64, 16)])
def test_narrower_tables_rotate_the_first_elements(width: int, rotated: int, dtype: Any) -> None:
    q, k = (random(5, 3, width, seed=seed).whole.to(dtype) for seed in range(2))
    cos, sin = (random(5, rotated, seed=seed).whole.to(dtype) for seed in (2, 3))
    heads = (x.transpose(0, 1)[None] for x in (q, k))
    theirs = partial_rotary_pos_emb(*heads, cos[None], sin[None])
    for ours, expected in zip((q, k), theirs, strict=True):
        output = ROPE(ours, cos, sin)
        assert torch.equal(output, expected[0].transpose(0, 1))
        assert torch.equal(output[..., rotated:], ours[..., rotated:])


@EXAMPLES
@given(st.data(), RANKS)
def test_partly_rotated_heads_on_ranks(data: st.DataObject, ranks: int) -> None:
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x = random(3, layout.size, 12).sharded(1, layout)
    run(ROPE, x, COS, SIN, ranks=ranks).assert_sound(exact=True)


def test_interleaved_and_back() -> None:
    x = torch.arange(8)
    assert interleave(x).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(split_halves(interleave(x)), x)
    nothing = torch.empty(0, 2, 8)
    assert interleave(nothing).shape == split_halves(nothing).shape == nothing.shape
    assert ROPE(nothing, nothing[:, 0], nothing[:, 0], True).shape == nothing.shape


@pytest.mark.parametrize("interleaved", [False, True])
@EXAMPLES
@given(st.data(), RANKS)
def test_heads_on_ranks(interleaved: bool, data: st.DataObject, ranks: int) -> None:
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x = random(3, layout.size, 8).sharded(1, layout)
    x = x.in_role(one_head(8)) if interleaved else x
    run(ROPE, x, COS, SIN, interleaved, ranks=ranks).assert_sound(exact=True)


@EXAMPLES
@given(st.integers(1, 9), RANKS)
def test_tokens_on_ranks(tokens: int, ranks: int) -> None:
    layout = TokenLayout(ranks)
    x = random(tokens, 4, 8, symbols=["T"]).sharded(0, layout)
    cos, sin = (random(tokens, 8, symbols=["T"], seed=s).sharded(0, layout) for s in (1, 2))
    run(ROPE, x, cos, sin, ranks=ranks).assert_sound(exact=True)


def test_refuses_half_a_head() -> None:
    refused("whole-heads", ROPE, X.sharded(2, WIDTH), COS, SIN)
    refused("rope", ROPE, X, COS.sharded(1, WIDTH), SIN.sharded(1, WIDTH))


@pytest.mark.parametrize("interleaved", [False, True])
def test_refuses_heads_in_the_other_order(interleaved: bool) -> None:
    x = random(3, 4, 8)
    ordered = (x.in_role(one_head(8)), x)
    infer(ROPE, ordered[not interleaved], COS, SIN, interleaved)
    refused("head-order", ROPE, ordered[interleaved], COS, SIN, interleaved)
    refused("head-order", ROPE, x.in_role(one_head(4)), COS, SIN, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_refuses_a_number_without_a_partner(interleaved: bool) -> None:
    tables = random(3, 7), random(3, 7)
    refused("rope", ROPE, random(3, 4, 7), *tables, interleaved)
    refused("rope", ROPE, random(3, 4, 8), *tables, interleaved)


def test_refuses_sums_not_taken() -> None:
    refused("partial-nonlinear", ROPE, X.partial(), COS, SIN)


def test_refuses_tables_whose_sum_was_not_taken() -> None:
    """Partial tables are refused: each rank would rotate by another angle."""
    refused("partial-nonlinear", ROPE, X, COS.partial(), SIN.partial())
    refused("partial-nonlinear", ROPE, X.sharded(1, HEADS), COS.partial(), SIN.partial())


def test_refuses_tables_of_other_tokens_or_widths() -> None:
    refused("rope", ROPE, X.in_role(one_head(8)), random(3, 4), random(3, 4), True)
    for tables in (random(2, 8), random(3, 10), random(3, 4, 8)):
        refused("rope", ROPE, X, tables, tables)
    refused("rope", ROPE, random(12, 8), COS, SIN)
    whole = random(4, 4, 8, symbols=["T"])
    tables = random(4, 8, symbols=["T"])
    refused("rope", ROPE, whole.sharded(0, TokenLayout(2)), tables, tables)
    split = tables.sharded(0, TokenLayout(2))
    refused("rope", ROPE, whole, split, split)
    refused("rope", ROPE, whole, split, tables)


def test_wide_tables_give_what_torch_gives() -> None:
    """bf16 heads rotated by fp32 tables are fp32; the type agrees, or the rule refuses."""
    x = operand(X.whole.bfloat16())
    sound_or_refused(ROPE, x, COS, SIN)


@pytest.mark.parametrize("target", [TABLES, ROTARY], ids=str)
def test_tables_have_the_tokens_the_width_and_the_dtype(target: Any) -> None:
    positions = ValueType(("T",), torch.int64)
    kinds = SPECS[target].rule(positions, 16, torch.bfloat16)
    assert kinds == (ValueType(("T", 16), torch.bfloat16),) * 2


def test_refuses_tables_of_some_tokens() -> None:
    positions = operand(torch.arange(4), ["T"]).sharded(0, TokenLayout(2))
    refused("positions", TABLES, positions, 16, torch.float32)


def test_the_mark_of_the_tables_computes_nothing() -> None:
    """The marker of the model's tables cannot be run; the rotary module computes them."""
    with pytest.raises(RuntimeError, match="only marks"):
        TABLES(torch.arange(3), 16, torch.float32)


PAIRS: dict[str, tuple[Any, int, bool, bool]] = {
    "cohere": (modeling_cohere, 16, False, True),
    "ernie4_5": (modeling_ernie4_5, 16, True, True),
    "glm4": (modeling_glm4, 16, True, False),
    "part of a head": (modeling_glm4, 8, True, False),
}
"""The modules, the width of the tables in heads of 16, and the options of the op."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_the_bits_of_rotated_pairs_are_hugging_face_s(name: str, dtype: Any) -> None:
    module, width, halves, wide = PAIRS[name]
    q, k = (random(5, 3, 16, seed=seed).whole.to(dtype) for seed in range(2))
    cos, sin = (random(5, width, seed=seed).whole.to(dtype) for seed in (2, 3))
    heads = (x.transpose(0, 1)[None] for x in (q, k))
    theirs = module.apply_rotary_pos_emb(*heads, cos[None], sin[None])
    for ours, expected in zip((q, k), theirs, strict=True):
        output = ROPE_PAIRS(ours, cos, sin, halves, wide)
        assert torch.equal(output, expected[0].transpose(0, 1))
        assert not torch.equal(output, ROPE(ours, cos, sin))


@EXAMPLES
@given(st.data(), RANKS, st.booleans(), st.booleans())
def test_rotated_pairs_on_ranks(data: st.DataObject, ranks: int, halves: bool, wide: bool) -> None:
    layout = data.draw(layouts(ranks, overlapping=True, grain=1))
    x = random(3, layout.size, data.draw(st.sampled_from((8, 12)))).sharded(1, layout)
    run(ROPE_PAIRS, x, COS, SIN, halves, wide, ranks=ranks).assert_sound(exact=True)


def test_refuses_pairs_that_are_not_rotated_whole() -> None:
    options = (False, False)
    refused("whole-heads", ROPE_PAIRS, X.sharded(2, WIDTH), COS, SIN, *options)
    refused("partial-nonlinear", ROPE_PAIRS, X.partial(), COS, SIN, *options)
    refused("role", ROPE_PAIRS, X.in_role(one_head(8)), COS, SIN, *options)
    narrow = operand(X.whole.bfloat16())
    refused("rope", ROPE_PAIRS, narrow, COS, SIN, *options)
    run(ROPE_PAIRS, narrow, COS, SIN, False, True, ranks=2).assert_sound(exact=True)
