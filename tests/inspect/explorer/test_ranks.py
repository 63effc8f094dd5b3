"""Who holds what: the layouts of a plan, and modules that are equal on several ranks."""

from __future__ import annotations

import pytest

from tests.inspect.explorer.recorded import MODELS, recorded
from tpcompile.inspect.explorer.ranks import axes_json, distinct
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import Layout
from tpcompile.ir.plan import HeadPlan, Plan, plan_heads


@pytest.mark.parametrize("model", MODELS)
def test_axes_are_those_of_the_plan(model: str) -> None:
    plan = info_of(recorded(model).prompt).plan
    assert plan is not None
    axes = axes_json(plan)
    assert [axis["axis"] for axis in axes] == ["q_heads", "kv_heads", "ffn", "vocab"]
    heads = next(iter(plan.heads.values()))
    layouts = [heads.queries, heads.keys, next(iter(plan.ffn.values())), plan.vocab]
    for axis, layout in zip(axes, layouts, strict=True):
        assert axis["layers"] == ""
        assert (axis["units"], axis["grain"]) == (layout.units, layout.grain)
        for rank in range(plan.tp):
            held = [(a * axis["grain"], b * axis["grain"]) for a, b in axis["parts"][rank]]
            assert held == list(layout.intervals(rank))


def test_each_kv_head_is_where_its_query_heads_are() -> None:
    """6 query heads on 4 ranks are 2 2 1 1, and 3 of them read each of 2 KV heads."""
    plan = info_of(recorded("qwen3 tp=4").prompt).plan
    assert plan is not None
    queries, keys = axes_json(plan)[:2]
    assert [list(map(list, part)) for part in queries["parts"]] == [
        [[0, 2]],
        [[2, 4]],
        [[4, 5]],
        [[5, 6]],
    ]
    assert [list(map(list, part)) for part in keys["parts"]] == [
        [[0, 1]],
        [[0, 2]],
        [[1, 2]],
        [[1, 2]],
    ]


def test_layers_are_named_if_layouts_differ() -> None:
    wide, narrow = plan_heads(8, 4, 2), plan_heads(4, 4, 2)
    ffn = Layout("ffn", 16, 1, (((0, 8),), ((8, 16),)))
    heads: dict[str, HeadPlan] = {
        "l0_attention": wide,
        "l1_attention": narrow,
        "l2_attention": wide,
    }
    axes = axes_json(Plan(2, heads, {f"l{n}_swiglu": ffn for n in range(3)}, ffn_like_vocab()))
    layers = {(axis["axis"], axis["units"]): axis["layers"] for axis in axes}
    assert layers == {
        ("q_heads", 8): "layers 0, 2",
        ("q_heads", 4): "layers 1",
        ("kv_heads", 4): "",
        ("ffn", 16): "",
        ("vocab", 10): "",
    }


def ffn_like_vocab() -> Layout:
    return Layout("vocab", 10, 1, (((0, 5),), ((5, 10),)))


def test_an_equal_module_is_stored_once() -> None:
    assert distinct(["a", "b", "a", "b", "c"]) == ["a", "b", 0, 1, "c"]
    assert distinct([]) == []
