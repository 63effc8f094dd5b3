"""Tests of which layers are considered copies of each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tests.models import pair_of, preset_pair, scaled_config
from tpcompile.errors import UnsupportedError
from tpcompile.frontend import capture
from tpcompile.frontend.layers import Layers, find_layers
from tpcompile.presets import preset


def _model(**changes: object) -> nn.Module:
    config = scaled_config("qwen3-0.6b", num_hidden_layers=4, **changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def test_layers_that_are_alike() -> None:
    layers = find_layers(_model())
    assert layers == Layers("model.layers", (0, 0, 0, 0))
    assert layers.traced() == (0,)
    assert layers.first_and_last() == ((0, 3),)
    assert [layers.template(layer) for layer in range(4)] == [0, 0, 0, 0]


def test_windows_make_another_kind() -> None:
    layers = find_layers(_model(use_sliding_window=True, sliding_window=5, max_window_layers=2))
    assert layers.kinds == (0, 0, 1, 1)
    assert layers.traced() == (0, 2)
    assert layers.first_and_last() == ((0, 1), (2, 3))
    assert [layers.template(layer) for layer in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.self_attn, "scaling", 0.5),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e-3),
        lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(64, 192, device="meta")),
        lambda layer: setattr(layer, "forward", lambda *_, **__: None),
        lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU()),
    ],
    ids=["scale", "epsilon", "bias", "own forward", "activation"],
)
def test_a_layer_that_differs_is_a_kind_of_its_own(change: object) -> None:
    model = _model()
    change(model.model.layers[2])  # type: ignore[operator, union-attr, index]
    assert find_layers(model).kinds == (0, 0, 1, 0)


def test_one_layer_is_enough() -> None:
    assert find_layers(_model(layer_types=None)).traced() == (0,)
    single = AutoConfig.for_model(**{**preset("tiny-qwen3"), "num_hidden_layers": 1})
    pair = pair_of(single)
    assert len(pair.captured.graph.graph.nodes) < 120
    assert Layers("model.layers", (0,)).first_and_last() == ()


def test_layers_that_look_alike_but_trace_differently_are_all_traced() -> None:
    """Layers with equal modules but different traces, here by layer number, are all traced."""
    config = copy.deepcopy(preset_pair("qwen3-0.6b").captured.config)
    config.num_hidden_layers = 4
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for layer in model.model.layers:
        layer.mlp.__class__ = _OddMlp
        layer.mlp.layer_idx = layer.self_attn.layer_idx
    captured = capture(model)
    expected = capture(model, stamped=False)
    names = [node.name for node in expected.graph.graph.nodes]
    assert [node.name for node in captured.graph.graph.nodes] == names
    products = [n for n in captured.graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    doubled = [node for node in products if node.args[1] == 2.0]
    assert len(doubled) == 1


class _OddMlp(Qwen3MLP):
    """MLP that doubles its result in the last layer only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x)
        return result * 2.0 if self.layer_idx == 3 else result


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no list of layers"):
        find_layers(nn.Linear(2, 2))


def test_renaming_touches_whole_path_components_only() -> None:
    layers = Layers("model.layers", (0,) * 20)
    assert layers.renamed("model.layers.1.mlp", 1, 7) == "model.layers.7.mlp"
    assert layers.renamed("model.layers.11.mlp", 1, 7) == "model.layers.11.mlp"
    assert layers.renamed("model.layers.1", 1, 7) == "model.layers.7"
    assert layers.layer_of("model.layers.11.mlp.weight") == 11
    assert layers.layer_of("model.norm.weight") is None
