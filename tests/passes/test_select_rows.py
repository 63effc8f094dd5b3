"""The rows of wanted logits are selected before the last values that only the logits need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from tests.models import batch, preset_pair, stage_logits
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import SEQUENCE_PARALLEL, TINY_VOCABULARY, step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION, LINEAR, RMS_NORM
from tpcompile.passes.select_rows import SelectRows
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
WIDTH = 8


def head_graph(
    *, norm_only: bool = False, read: bool = False, axis: str = "rows"
) -> fx.GraphModule:
    """Return rows of `norm(x + up(x))` with the requested deviations."""
    builder = GraphBuilder()
    x = builder.input("x", "T", WIDTH)
    rows = builder.input("rows", "R", dtype=torch.int64)
    added = x if norm_only else builder.linear(x, "up", WIDTH, WIDTH)
    total = builder.call(aten.add.Tensor, x, added)
    normed = builder.call(RMS_NORM, total, builder.parameter("scale", WIDTH), 1e-6)
    if axis == "columns":
        return builder.done(builder.call(aten.index_select.default, normed, 1, rows))
    picked = builder.call(aten.index_select.default, normed, 0, rows)
    if not read:
        return builder.done(picked)
    first = builder.call(aten.index_select.default, added, 0, rows)
    return builder.done(builder.call(aten.add.Tensor, picked, first))


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/select_rows.txt", step("select-rows").diff(hidden="layer 0"))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    """With all rows, as here, selecting early changes no bit."""
    step("select-rows", model, tp).assert_same_bits()
    step("select-rows", model, tp).assert_near()


@pytest.mark.parametrize("rows", [(), (7,), (2, 2, 0), (0, 3, 7)])
@pytest.mark.parametrize("tp", [1, 3])
def test_some_rows(tp: int, rows: tuple[int, ...]) -> None:
    current = step("select-rows", tp=tp)
    inputs = replace(batch((3, 1, 4), TINY_VOCABULARY), logit_rows=torch.tensor(rows).long())
    before, after = (
        stage_logits(stage.graph, preset_pair("tiny-qwen3"), inputs)
        for stage in (current.before, current.after)
    )
    assert after.shape == (len(rows), TINY_VOCABULARY)
    torch.testing.assert_close(after, before)


def test_the_last_mlp_has_only_the_wanted_rows() -> None:
    """The keys and values of all tokens are still computed."""
    gm = step("select-rows").after.graph
    linears = [str(value_type(node).shape[0]) for node in calls(gm, LINEAR)]
    assert linears == [*"TTTT", "T", *"RRR", "R"]
    assert {str(value_type(node).shape[0]) for node in calls(gm, ATTENTION)} == {"T"}


def test_again() -> None:
    assert "no linear computes it row by row" in nearest(step("select-rows").again())


def test_tokens_on_several_ranks_are_gathered_first() -> None:
    """With sequence-parallel, rows are not on every rank between the linears."""
    passes = SEQUENCE_PARALLEL.replace("greedy-head", "select-rows,greedy-head")
    current = step("select-rows", tp=2, pipeline=passes)
    assert "no linear computes it row by row" in current.after.stats.nearest
    assert current.after.text() == current.before.text()


def test_inputs_are_selected_too() -> None:
    gm = head_graph()
    shapes = {"scale": (WIDTH,), "up_weight": (WIDTH, WIDTH)}
    for name, shape in shapes.items():
        setattr(gm, name, torch.nn.Parameter(torch.randn(shape), requires_grad=False))
    x, rows = torch.randn(5, WIDTH), torch.tensor([4, 1])
    before = gm(x, rows)
    assert SelectRows().apply(gm).matches == 1
    assert check_graph(gm) == []
    (linear,) = calls(gm, LINEAR)
    assert value_type(linear).shape[0] == "R"
    (picked,) = calls(gm, aten.index_select.default)  # both readers of x read the same rows
    assert picked.args[0].name == "x"
    gm.recompile()
    torch.testing.assert_close(gm(x, rows), before)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"read": True}, "no linear computes it row by row"),
        ({"norm_only": True}, "no linear computes it row by row"),
        ({"axis": "columns"}, "it does not select rows of the step"),
    ],
)
def test_near_miss_is_left_alone(changed: dict[str, object], reason: str) -> None:
    gm = head_graph(**changed)  # type: ignore[arg-type]
    before = [str(node) for node in gm.graph.nodes]
    assert reason in nearest(SelectRows().apply(gm))
    assert [str(node) for node in gm.graph.nodes] == before
