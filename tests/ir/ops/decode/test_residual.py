"""A projection added to the residual, which is counted once on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ir.ranks import Operand, operand, random, refused, run, whole_numbers
from tpcompile.ir.layout import Layout, TokenLayout, even_runs
from tpcompile.ir.ops import ALL_REDUCE_RESIDUAL, LINEAR, LINEAR_RESIDUAL, SPECS
from tpcompile.ir.ops.collectives import tree_sum
from tpcompile.ir.types import PARTIAL, REPLICATE, ValueType

X, WEIGHT, BIAS = random(3, 6), random(5, 6, seed=1), random(5, seed=2)
RESIDUAL = random(3, 5, seed=3)
COLUMNS = Layout("ffn", 6, 1, even_runs(6, 2))
ROWS = Layout("rows", 5, 1, even_runs(5, 2))


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_the_same_bits_as_linear_and_sum(bias: Operand | None) -> None:
    added = None if bias is None else bias.whole
    output = LINEAR_RESIDUAL(X.whole, WEIGHT.whole, added, RESIDUAL.whole)
    assert torch.equal(output, RESIDUAL.whole + LINEAR(X.whole, WEIGHT.whole, added))
    outcome = run(LINEAR_RESIDUAL, X, WEIGHT, bias, RESIDUAL, ranks=2)
    assert isinstance(outcome.kind, ValueType) and outcome.kind.placement == REPLICATE
    outcome.assert_sound(exact=True)


def test_rows_and_tokens_of_a_rank_are_sound() -> None:
    """Split rows or split tokens, where no sum across ranks is needed, are sound."""
    split = RESIDUAL.sharded(1, ROWS)
    biased = (WEIGHT.sharded(0, ROWS), BIAS.sharded(0, ROWS))
    run(LINEAR_RESIDUAL, X, *biased, split, ranks=2).assert_sound()
    x, residual = (operand(item.whole, ["T"]).sharded(0, TokenLayout(2)) for item in (X, RESIDUAL))
    run(LINEAR_RESIDUAL, x, WEIGHT, BIAS, residual, ranks=2).assert_sound()


def test_a_sum_across_ranks_and_the_residual_once() -> None:
    partial, residual = whole_numbers(3, 5).partial(), whole_numbers(3, 5, seed=1)
    for ranks in (1, 2, 3, 5):
        outcome = run(ALL_REDUCE_RESIDUAL, partial, residual, ranks=ranks)
        assert isinstance(outcome.kind, ValueType) and outcome.kind.placement == REPLICATE
        outcome.assert_sound(exact=True)
        assert torch.equal(outcome.ranks[0], partial.whole + residual.whole)


def test_a_bias_counts_once_too() -> None:
    """Trap 6: a bias is counted once on any number of ranks."""
    partial, residual = whole_numbers(3, 5).partial(), whole_numbers(3, 5, seed=1)
    bias = whole_numbers(5, seed=2)
    for ranks in (1, 2, 3, 5):
        outcome = run(ALL_REDUCE_RESIDUAL, partial, residual, bias, ranks=ranks)
        outcome.assert_sound(exact=True)
        assert torch.equal(outcome.ranks[0], partial.whole + residual.whole + bias.whole)
    called = ALL_REDUCE_RESIDUAL(partial.whole, residual.whole, bias.whole)
    assert torch.equal(called, partial.whole + residual.whole + bias.whole)


def test_a_bias_of_bf16_is_added_before_the_sum_is_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = list(torch.randn(3, 40, 5, generator=generator).bfloat16())
    residual = torch.randn(40, 5, generator=generator).bfloat16()
    bias = torch.randn(5, generator=generator).bfloat16()
    kind = ValueType((40, 5), torch.bfloat16)
    across = SPECS[ALL_REDUCE_RESIDUAL].across
    assert across is not None
    sums = across(terms, kind.placed(PARTIAL), kind, [residual] * 3, [bias] * 3)
    expected = (residual + (tree_sum(terms, torch.float32) + bias)).bfloat16()
    late = residual + (tree_sum(terms, torch.float32) + bias).bfloat16()
    assert not torch.equal(expected, late)
    assert all(torch.equal(total, expected) for total in sums)


def test_terms_of_bf16_are_rounded_once() -> None:
    """Sums of bf16 terms and the residual are rounded once, as with separate ops in fp32."""
    generator = torch.Generator().manual_seed(0)
    terms = list(torch.randn(3, 4, 5, generator=generator).bfloat16())
    residual = torch.randn(4, 5, generator=generator).bfloat16()
    kind = ValueType((4, 5), torch.bfloat16)
    across = SPECS[ALL_REDUCE_RESIDUAL].across
    assert across is not None
    sums = across(terms, kind.placed(PARTIAL), kind, [residual] * 3)
    expected = (residual + tree_sum(terms, torch.float32)).bfloat16()
    twice = residual + tree_sum(terms, torch.float32).bfloat16()
    assert not torch.equal(expected, twice)
    assert len(sums) == 3
    assert all(torch.equal(total, expected) for total in sums)
    assert all(total.dtype == torch.bfloat16 for total in sums)


REFUSALS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "the residual on every rank": (
        "residual-once",
        LINEAR_RESIDUAL,
        (X.sharded(1, COLUMNS), WEIGHT.sharded(1, COLUMNS), None, RESIDUAL),
    ),
    "a bias on every rank": (
        "bias-once",
        LINEAR_RESIDUAL,
        (X.sharded(1, COLUMNS), WEIGHT.sharded(1, COLUMNS), BIAS, RESIDUAL),
    ),
    "columns in another layout": (
        "contraction-layout",
        LINEAR_RESIDUAL,
        (X, WEIGHT.sharded(1, COLUMNS), None, RESIDUAL),
    ),
    "rows beside a whole residual": (
        "same-layout",
        LINEAR_RESIDUAL,
        (X, WEIGHT.sharded(0, ROWS), None, RESIDUAL),
    ),
    "a partial residual": (
        "partial-nonlinear",
        LINEAR_RESIDUAL,
        (X, WEIGHT, None, RESIDUAL.partial()),
    ),
    "a residual that would broadcast": (
        "residual",
        LINEAR_RESIDUAL,
        (X, WEIGHT, None, random(1, 5)),
    ),
    "a residual of another dtype": (
        "residual",
        LINEAR_RESIDUAL,
        (X, WEIGHT, None, operand(RESIDUAL.whole.double())),
    ),
    "a replicated operand": ("all-reduce", ALL_REDUCE_RESIDUAL, (RESIDUAL, RESIDUAL)),
    "a split operand": (
        "all-reduce",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.sharded(1, ROWS), RESIDUAL),
    ),
    "a partial residual with partial terms": (
        "residual-once",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL.partial()),
    ),
    "a split residual": (
        "residual-once",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL.sharded(1, ROWS)),
    ),
    "a partial bias": (
        "bias-once",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL, BIAS.partial()),
    ),
    "a split bias": (
        "bias-once",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL, BIAS.sharded(0, ROWS)),
    ),
    "a bias per row": (
        "bias-shape",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL, random(3)),
    ),
    "a bias of another dtype": (
        "bias-shape",
        ALL_REDUCE_RESIDUAL,
        (RESIDUAL.partial(), RESIDUAL, operand(BIAS.whole.double())),
    ),
    "terms of another shape": (
        "residual",
        ALL_REDUCE_RESIDUAL,
        (random(1, 5).partial(), RESIDUAL),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    """Trap 6 is among the refusals: a term added on each rank would be counted tp times."""
    rule, target, operands = REFUSALS[name]
    refused(rule, target, *operands)
