"""A residual sum and the following norm are fused, unless another op reads the sum first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import ADD_RMS_NORM, RMS_NORM
from tpcompile.passes.fuse_add_norm import FuseAddNorm
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
WIDTH = 8


def residual_graph(
    *, number: bool = False, narrow: bool = False, early: bool = False
) -> fx.GraphModule:
    """Return `norm(x + y) + (x + y)` with the requested deviations."""
    made = GraphBuilder()
    x = made.input("x", "T", WIDTH)
    y = made.input("y", WIDTH) if narrow else made.input("y", "T", WIDTH)
    total = made.call(aten.add.Tensor, x, 1.0 if number else y)
    read = made.call(aten.neg.default, total) if early else None
    normed = made.call(RMS_NORM, total, made.parameter("scale", WIDTH), 1e-6)
    result = made.call(aten.add.Tensor, normed, total)
    return made.done(made.call(aten.add.Tensor, result, read) if read else result)


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_add_norm.txt", step("fuse-add-norm").diff())


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_all_norms_of_the_residual_but_the_first(model: str) -> None:
    """The first norm has no sum to fuse with: its operand is the embedding."""
    assert step("fuse-add-norm", model).matches == 2 * 2 + 1 - 1


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    step("fuse-add-norm", model, tp).assert_same_bits()
    step("fuse-add-norm", model, tp).assert_near()


def test_again() -> None:
    assert "its input is not a sum" in nearest(step("fuse-add-norm").again())


def test_readers_behind_the_norm_get_the_sum() -> None:
    gm = residual_graph()
    gm.scale = torch.nn.Parameter(torch.randn(WIDTH), requires_grad=False)
    x, y = torch.randn(2, 3, WIDTH).unbind()
    before = gm(x, y)
    assert FuseAddNorm().apply(gm).matches == 1
    assert check_graph(gm) == []
    (fused,) = calls(gm, ADD_RMS_NORM)
    assert {user.name for user in fused.users} == {"normed", "residual"}
    gm.recompile()
    assert torch.equal(gm(x, y), before)


def test_two_norms_of_one_sum_add_once() -> None:
    made = GraphBuilder()
    total = made.call(aten.add.Tensor, made.input("x", "T", 8), made.input("y", "T", 8))
    norms = [made.call(RMS_NORM, total, made.parameter(name, 8), 1e-6) for name in "ab"]
    gm = made.done(made.call(aten.add.Tensor, *norms))
    assert FuseAddNorm().apply(gm).matches == 1
    assert len(calls(gm, RMS_NORM)) == len(calls(gm, ADD_RMS_NORM)) == 1
    assert check_graph(gm) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("early", "%neg reads the sum before the norm"),
        ("number", "it is not a plain sum of two values"),
        ("narrow", "its terms must have the same shape"),
    ],
)
def test_near_miss_is_left_alone(changed: str, reason: str) -> None:
    gm = residual_graph(**{changed: True})
    before = len(gm.graph.nodes)
    assert reason in nearest(FuseAddNorm().apply(gm))
    assert len(gm.graph.nodes) == before
    assert not calls(gm, ADD_RMS_NORM)


def test_a_norm_of_no_sum_is_left_alone() -> None:
    made = GraphBuilder()
    x = made.input("x", "T", WIDTH)
    gm = made.done(made.call(RMS_NORM, x, made.parameter("scale", WIDTH), 1e-6))
    assert "its input is not a sum" in nearest(FuseAddNorm().apply(gm))
