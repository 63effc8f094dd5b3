"""Values are named by their role; names that are invalid in Python are avoided."""

from __future__ import annotations

import keyword
from collections import Counter

import pytest
import torch
from torch import fx, nn

from tests.models import preset_pair
from tpcompile.backends.torch_tp.expressions import Scope
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.names import name_values, short_name
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.recipe import Tensor
from tpcompile.passes import decode_pipeline, default_pipeline, run_passes

LAYER = [
    *("input_normed", "q_proj", "q", "q_normed", "q_rotated", "k_rotated", "v", "attention"),
    *("o_proj", "o_proj_sum", "residual", "post_attention_normed", "swiglu", "down_proj_sum"),
]


def test_a_layer_of_qwen3() -> None:
    graph = run_passes(preset_pair("tiny-qwen3").captured.graph, default_pipeline(2))[0].graph
    names = [node.name for node in graph.nodes]
    for layer in (0, 1):
        for role in LAYER:
            assert f"l{layer}_{role}" in names
    assert {"embedding", "embedding_sum", "normed", "lm_head", "tokens"} <= set(names)


LINEAR_ATTENTION = [
    *("in_proj_qkv", "z", "conv", "conv_parts", "q_conv", "k_conv", "v_conv", "q", "k", "v"),
    *("beta", "decay", "delta_rule", "normed", "normed_flat", "out_proj", "out_proj_sum"),
]
GATED_ATTENTION = [
    *("q_proj", "q_proj_1", "q", "q_normed", "q_rotated", "k_normed"),
    *("k_rotated", "v", "attention", "gated", "o_proj", "o_proj_sum"),
]


def test_layers_of_qwen35() -> None:
    graph = run_passes(preset_pair("tiny-qwen3.5").captured.graph, default_pipeline(2))[0].graph
    names = {node.name for node in graph.nodes}
    for layer, roles in ((0, LINEAR_ATTENTION), (2, LINEAR_ATTENTION), (3, GATED_ATTENTION)):
        assert {f"l{layer}_{role}" for role in roles} <= names
    numbered = {name for name in names if name.removeprefix("l0_").startswith("getitem")}
    assert not numbered


@pytest.mark.parametrize("passes", [default_pipeline(2), decode_pipeline(2)])
def test_names_differ_and_stay_in_a_copy(passes: list[object]) -> None:
    graph, stages = run_passes(preset_pair("tiny-qwen3").captured.graph, passes)  # type: ignore[arg-type]
    for stage in stages:
        names = [node.name for node in stage.graph.graph.nodes]
        assert set(Counter(names).values()) == {1}, stage.name
        assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
        copied = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in stage.graph.graph.nodes:
            values[node] = copied.node_copy(node, values.__getitem__)
        assert [node.name for node in copied.nodes] == names, stage.name
    assert [n.name for n in stages[-1].graph.graph.nodes] == [n.name for n in graph.graph.nodes]


@pytest.mark.parametrize("odd", ["0", "class", "self", "tpc"])
def test_a_name_that_python_cannot_have(odd: str) -> None:
    """A role that is no valid identifier, such as `0` in a module list, gives a valid name."""
    graph, root = fx.Graph(), nn.Module()
    origin = Origin("layers.3.mlp", layer=3)
    x = graph.placeholder("x")
    parameter = Parameter.replicated(Tensor("w", (2, 2)), torch.float32, 1)
    weight = new_parameter(graph, f"l3_{odd}", parameter, origin, root)
    linear = graph.call_function(LINEAR, (x, weight))
    linear.meta["origin"] = origin
    name_values(graph)
    assert linear.name == f"l3_{odd}_1"
    assert short_name(weight) == f"l3_{odd}"
    assert Scope(0, {}, {}, layer=3).text(weight) == f"self.l3_{odd}"
