"""Mistakes are reported at the node where they were made; correct graphs pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.models import batch, preset_pair, run
from tests.stages import graph_after
from tpcompile.compare.comparison import Comparison, compare
from tpcompile.ir.meta import origin_of, parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ATTENTION, RMS_NORM, ROPE
from tpcompile.passes import default_pipeline
from tpcompile.rewriting.rewrite import calls

UNFUSED = [current.name for current in default_pipeline(3)].index("fuse-qkv")
"""Omit the fusions at the end of the pipeline, so that all nodes are separate."""


def compared(
    change: Callable[[fx.GraphModule], object] | None = None, model: str = "tiny-qwen3", tp: int = 3
) -> Comparison:
    """Compare a preset on some ranks, after an optional change."""
    pair, packed = preset_pair(model), batch((4, 9), 1013)
    gm = graph_after(pair, default_pipeline(tp)[:UNFUSED])
    if change is not None:
        change(gm)
    captured = run(pair.captured.graph, pair, packed)
    return compare(captured, gm, run(gm, pair, packed))


def test_a_good_graph_agrees() -> None:
    comparison = compared()
    assert comparison.ok
    assert len(comparison.rows) > 40
    assert comparison.top5["eager"] == comparison.top5["compiled"]
    assert "FIRST DIVERGENCE" not in comparison.table()
    assert comparison.to_json()["first_divergence"] is None


def _weight(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in parameters(gm.graph) if name in parameter_of(n).describe())


def swapped_ranks(gm: fx.GraphModule) -> None:
    node = _weight(gm, "layers.1.self_attn.q_proj")
    first, second, *remaining = parameter_of(node).shards
    wrong = dataclasses.replace(parameter_of(node), shards=(second, first, *remaining))
    set_parameter(node, wrong)


def other_epsilon(gm: fx.GraphModule) -> None:
    calls(gm, RMS_NORM)[0].update_arg(2, 1e-2)


def no_rotation(gm: fx.GraphModule) -> None:
    rotated = calls(gm, ROPE)[3]
    rotated.replace_all_uses_with(rotated.args[0])  # type: ignore[arg-type]


def other_scale(gm: fx.GraphModule) -> None:
    calls(gm, ATTENTION)[1].update_arg(4, 1.0)


def twice_the_mlp(gm: fx.GraphModule) -> None:
    down = next(n for n in gm.graph.nodes if "layers.0.mlp.down_proj" in origin_of(n).module
                and n.op == "call_function" and len(n.args) == 2)  # fmt: skip
    down.args = (down.args[0], down.args[1])
    with gm.graph.inserting_after(down):
        doubled = gm.graph.call_function(torch.ops.aten.add.Tensor, (down, down))
    doubled.meta = {"origin": origin_of(down), "type": down.meta["type"]}
    down.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)


MISTAKES = {
    "slices swapped between ranks": (swapped_ranks, "model.layers.1.self_attn.q_proj", 1),
    "another epsilon": (other_epsilon, "model.layers.0.input_layernorm", 0),
    "keys not rotated": (no_rotation, "model.layers.1.self_attn", 1),
    "another scale": (other_scale, "model.layers.1.self_attn", 1),
    "the MLP added twice": (twice_the_mlp, "model.layers.0.mlp.down_proj", 0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_was_made(name: str) -> None:
    change, module, layer = MISTAKES[name]
    comparison = compared(change)
    first = comparison.first_divergence
    assert first is not None
    assert (first.source.split(" ")[0], first.layer) == (module, layer)
    assert not comparison.ok
    before = comparison.rows[: comparison.rows.index(first)]
    assert all(row.ok for row in before)
    assert f"FIRST DIVERGENCE at %{first.node}" in comparison.table()
    assert comparison.to_json()["first_divergence"]["node"] == first.node


def swapped_channels(gm: fx.GraphModule) -> None:
    node = _weight(gm, "layers.1.linear_attn.conv1d")
    wrong = dataclasses.replace(parameter_of(node), shards=parameter_of(node).shards[::-1])
    set_parameter(node, wrong)


def test_a_mistake_in_linear_attention_is_found_by_the_name_of_its_value() -> None:
    comparison = compared(swapped_channels, "tiny-qwen3.5", 2)
    first = comparison.first_divergence
    assert first is not None
    assert (first.node, first.layer) == ("l1_conv", 1)
    assert first.source.startswith("model.layers.1.linear_attn ")
    names = {row.node for row in comparison.rows}
    parts = (
        "in_proj_qkv",
        "in_proj_z",
        "q_conv",
        "k_conv",
        "v_conv",
        "beta",
        "decay",
        "delta_rule",
    )
    assert {f"l2_{part}" for part in parts} | {"l3_gated", "l3_q_proj_1"} <= names
    assert compared(None, "tiny-qwen3.5", 2).ok


def test_all_values_can_be_shown() -> None:
    comparison = compared()
    assert comparison.table(everything=True).count(" ok ") == len(comparison.rows)
    assert comparison.table().count(" ok ") <= 4


def test_nan_is_null_in_json() -> None:
    """NaN is null in JSON, since strict parsers reject NaN."""

    def spoil(gm: fx.GraphModule) -> None:
        norm = next(node for node in gm.graph.nodes if node.target is RMS_NORM)
        norm.args = (*norm.args[:2], float("nan"))

    report = compared(spoil).to_json()
    json.dumps(report, allow_nan=False)
    assert (
        report["first_divergence"]["rel"] is None and "NaN" in report["first_divergence"]["problem"]
    )
