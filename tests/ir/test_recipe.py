"""Tests of recipes: shapes, tensors, parts and text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.strategies import EXAMPLES, recipes
from tpcompile.ir.recipe import (
    Concat,
    Pad,
    Permute,
    Recipe,
    Slice,
    Tensor,
    concat,
    describe,
    shape_of,
    shard,
    take,
    tensors_of,
    with_item,
)

Q, K = Tensor("q.weight", (12, 5)), Tensor("k.weight", (4, 5))
HEADS = Permute(Q, 0, (3, 2, 2), (0, 2, 1))


@pytest.mark.parametrize(
    ("recipe", "shape", "text"),
    [
        (Q, (12, 5), "q.weight"),
        (Slice(Q, 0, 2, 8), (6, 5), "q.weight[2:8]"),
        (Slice(Q, 1, 2, 4), (12, 2), "q.weight[:, 2:4]"),
        (Concat((Q, K), 0), (16, 5), "q.weight ++ k.weight"),
        (
            Permute(Q, 0, (3, 4), (1, 0)),
            (12, 5),
            "permute(q.weight, dim 0 as (3, 4) to (1, 0))",
        ),
        (Pad(Q, 0, 4), (16, 5), "pad(q.weight, dim 0 by 4)"),
        (
            Concat((Slice(Q, 0, 0, 2), Pad(K, 1, 0)), 0),
            (6, 5),
            "q.weight[0:2] ++ pad(k.weight, dim 1 by 0)",
        ),
    ],
)
def test_shape_and_text(recipe: Recipe, shape: tuple[int, ...], text: str) -> None:
    assert shape_of(recipe) == shape
    assert describe(recipe) == text


def test_tensors_come_from_left_to_right() -> None:
    recipe = Concat((Slice(K, 0, 0, 1), Pad(Permute(Q, 0, (3, 4), (1, 0)), 0, 1), K), 0)
    assert list(tensors_of(recipe)) == [K, Q, K]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (take(Q, 0, 0, 12), Q),
        (take(Q, 0, 2, 5), Slice(Q, 0, 2, 5)),
        (take(Slice(Q, 0, 2, 8), 0, 1, 3), Slice(Q, 0, 3, 5)),
        (take(Slice(Q, 0, 2, 8), 1, 1, 3), Slice(Slice(Q, 1, 1, 3), 0, 2, 8)),
        (take(Concat((Q, K), 0), 0, 12, 16), K),
        (take(Concat((Q, K), 0), 0, 11, 13), Concat((Slice(Q, 0, 11, 12), Slice(K, 0, 0, 1)), 0)),
        (take(Concat((Q, K), 0), 1, 0, 2), Concat((Slice(Q, 1, 0, 2), Slice(K, 1, 0, 2)), 0)),
        (take(HEADS, 0, 4, 12), Permute(Slice(Q, 0, 4, 12), 0, (2, 2, 2), (0, 2, 1))),
        (take(HEADS, 0, 2, 8), Slice(HEADS, 0, 2, 8)),
        (take(HEADS, 1, 2, 4), Permute(Slice(Q, 1, 2, 4), 0, (3, 2, 2), (0, 2, 1))),
        (
            take(Permute(Q, 0, (3, 4), (1, 0)), 0, 4, 8),
            Slice(Permute(Q, 0, (3, 4), (1, 0)), 0, 4, 8),
        ),
        (take(Pad(Q, 0, 2), 0, 10, 14), Slice(Pad(Q, 0, 2), 0, 10, 14)),
    ],
    ids=str,
)
def test_parts_are_pushed_down_to_the_tensors(taken: Recipe, expected: Recipe) -> None:
    assert taken == expected


def test_the_recipe_of_a_rank() -> None:
    assert shard(Q, 0, [(0, 12)]) == Q
    assert shard(Q, 0, [(0, 2), (6, 8)]) == Concat((Slice(Q, 0, 0, 2), Slice(Q, 0, 6, 8)), 0)
    assert concat([Q], 0) is Q
    assert with_item((1, 2, 3), 1, 7) == (1, 7, 3)


@EXAMPLES
@given(recipes())
def test_recipes_are_values(recipe: Recipe) -> None:
    """Recipes are hashable and comparable, and their text names all tensors."""
    assert recipe in {recipe}
    assert all(tensor.name in describe(recipe) for tensor in tensors_of(recipe))


@EXAMPLES
@given(recipes(), st.data())
def test_parts_of_all_dimensions_have_their_extents(recipe: Recipe, data: st.DataObject) -> None:
    shape = shape_of(recipe)
    for dim, extent in enumerate(shape):
        start = data.draw(st.integers(0, extent - 1))
        stop = data.draw(st.integers(start + 1, extent))
        recipe = take(recipe, dim, start, stop)
        shape = with_item(shape, dim, stop - start)
        assert shape_of(recipe) == shape
