"""Recipes are read back as they are written, and wrong ones are refused."""

from __future__ import annotations

import pytest

from tpcompile.errors import UsageError
from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, Tensor
from tpcompile.ir.text.recipes import RecipeParser, written_recipe
from tpcompile.ir.text.scanner import Scanner

Q, K = Tensor("q.weight", (12, 8)), Tensor("k.weight", (4, 8))
SHAPE = (4, 8)


def parsed(text: str) -> Recipe:
    line = Scanner(3, text)
    recipe = RecipeParser(line, SHAPE).recipe()
    line.expect_end()
    return recipe


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (K, "k.weight"),
        (Q, "q.weight(12, 8)"),
        (Tensor('a "b"\n', SHAPE), r'"a \"b\"\n"'),
        (Tensor("pad", SHAPE), '"pad"'),
        (Slice(Q, 0, 3, 6), "q.weight(12, 8)[3:6]"),
        (Slice(Slice(Q, 0, 3, 6), 1, 0, 4), "q.weight(12, 8)[3:6][:, 0:4]"),
        (Concat((Q, Slice(K, 0, 1, 2)), 0), "q.weight(12, 8) ++ k.weight[1:2]"),
        (Concat((K, K), 1), "k.weight ++(dim 1) k.weight"),
        (Concat((Concat((K, K), 1), Concat((K, K), 1)), 0),
         "(k.weight ++(dim 1) k.weight) ++ (k.weight ++(dim 1) k.weight)"),
        (Slice(Concat((K, Q), 0), 0, 2, 7), "(k.weight ++ q.weight(12, 8))[2:7]"),
        (Permute(Q, 0, (3, 4), (1, 0)), "permute(q.weight(12, 8), dim 0 as (3, 4) to (1, 0))"),
        (Pad(K, 0, 2), "pad(k.weight, dim 0 by 2)"),
    ],
)  # fmt: skip
def test_both_ways(recipe: Recipe, text: str) -> None:
    assert written_recipe(recipe, SHAPE) == text
    assert parsed(text) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k.weight[4:4]", "not inside of 4 indices"),
        ("k.weight[0:5]", "not inside of 4 indices"),
        ("k.weight[:, :, 0:1]", "no dimension 2"),
        ("k.weight ++ q.weight(12, 9)", "cannot be joined"),
        ("k.weight ++(dim 2) k.weight", "cannot be joined"),
        ("k.weight ++ k.weight ++(dim 1) k.weight", "dimensions of a concatenation differ"),
        ("permute(k.weight, dim 0 as (2, 3) to (1, 0))", "not a permutation"),
        ("permute(k.weight, dim 0 as (2, 2) to (1, 1))", "not a permutation"),
        ("pad(k.weight, dim 2 by 1)", "no dimension 2"),
        ("k.weight(0, 8)", "cannot have the shape"),
        ("k.weight(9999999999, 9999999999)", "cannot have the shape"),
        ("(" * 40 + "k.weight" + ")" * 40, "nested too deeply"),
        ("(k.weight", "not valid"),
        ("k.weight]", "unexpected text"),
    ],
)
def test_wrong_recipes_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parsed(text)
    assert error.value.where.startswith("line 3, column ")
