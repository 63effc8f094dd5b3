"""Captured models of several families equal Hugging Face eager."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests.models import (
    TOLERANCE,
    VOCABULARY,
    Pair,
    batch,
    eager_logits,
    pair_of,
    preset_pair,
    relative_error,
    scaled_config,
    stage_logits,
)
from tests.stages import graph_after
from tpcompile.frontend import INPUTS, capture
from tpcompile.ir.meta import origin_of, parameter_of, parameters
from tpcompile.ir.ops import spec_of
from tpcompile.passes import default_pipeline, run_passes

LENGTHS = (3, 33, 9)

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Shared settings, with heads of width 16; families add their own."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, every layer sliding": {"model_type": "mistral", "sliding_window": 7},
    "qwen2, sliding from layer 1": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3, sliding from layer 2 of 5": {
        "model_type": "qwen3",
        "head_dim": 16,
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3, window in every other layer": {
        "model_type": "qwen3",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3 with attention bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3, heads of 80": {"model_type": "qwen3", "head_dim": 80},
    "qwen3, one KV head": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1},
    "qwen2, as many KV heads": {"model_type": "qwen2", "num_key_value_heads": 6},
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"partial_rotary_factor": 1.0},
}


def family(name: str) -> Any:
    return AutoConfig.for_model(**{**SMALL, **FAMILIES[name]})


@cache
def family_pair(name: str) -> Pair:
    return pair_of(family(name))


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tp: int) -> None:
    pair = family_pair(name)
    graph = graph_after(pair, default_pipeline(tp))
    logits = stage_logits(graph, pair, batch(LENGTHS))
    assert relative_error(logits, eager_logits(pair.eager, LENGTHS)) < TOLERANCE


@pytest.mark.parametrize("kind", ROPES)
def test_rope_types(kind: str) -> None:
    """All RoPE types equal eager, including dynamic and longrope beyond the original length."""
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}
    longest = 16 if kind == "dynamic" else 64
    config = scaled_config(
        "qwen3-0.6b", max_position_embeddings=longest, rope_parameters=parameters
    )
    pair = pair_of(config)
    graph = graph_after(pair, default_pipeline(3))
    errors = []
    for lengths in ((33,), (5,), (3, 33, 9)):
        logits = stage_logits(graph, pair, batch(lengths))
        errors.append(relative_error(logits, eager_logits(pair.eager, lengths)))
    assert max(errors) < TOLERANCE


def test_every_rope_type_of_hugging_face_is_tried() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPES)


@pytest.mark.parametrize(
    "name", ["qwen3, sliding from layer 2 of 5", "qwen3, window in every other layer", "llama"]
)
def test_stamped_layers_are_those_of_the_full_capture(name: str) -> None:
    stamped = family_pair(name).captured
    full = capture(family(name), dtype=torch.float32, stamped=False)
    first, second = stamped.graph.graph.nodes, full.graph.graph.nodes
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert (a.op, a.target, a.name) == (b.op, b.target, b.name)
        assert str(a.args) == str(b.args)
        assert str(a.kwargs) == str(b.kwargs)
        assert a.meta == b.meta


def test_every_node_says_where_it_comes_from() -> None:
    graph = preset_pair("tiny-qwen3").captured.graph.graph
    in_layers = [n for n in graph.nodes if spec_of(n) and origin_of(n).layer is not None]
    assert len(in_layers) > 100
    for node in in_layers:
        origin = origin_of(node)
        assert origin.module.startswith(f"model.layers.{origin.layer}")
        assert origin.file.endswith(("modeling_qwen3.py", "activations.py"))
        assert origin.line > 0


def test_inputs_are_flat_runs_of_tokens() -> None:
    graph = preset_pair("tiny-qwen2").captured.graph.graph
    inputs = {n.name: n.meta["type"].shape for n in graph.nodes if n.op == "placeholder"}
    assert inputs == {name: (symbol,) for name, symbol in INPUTS.items()}


def test_tied_weights_are_one_parameter() -> None:
    captured = family_pair("qwen3, tied").captured
    table = [n for n in parameters(captured.graph.graph) if len(n.users) == 2]
    assert [parameter_of(n).describe() for n in table] == ["model.embed_tokens.weight"]
    assert captured.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = family_pair("llama").captured
    assert "lm_head.weight" in untied.tensors
    assert not untied.aliases


def test_the_users_model_is_left_as_it_was() -> None:
    model = AutoModelForCausalLM.from_config(family("qwen3, tied"), dtype=torch.float32).eval()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    modules = [id(m) for m in model.modules()]
    setting = model.config._attn_implementation
    captured = capture(model)
    assert captured.model is model
    assert model.config._attn_implementation == setting
    assert [id(m) for m in model.modules()] == modules
    for name, parameter in model.named_parameters():
        assert before[name][0] == id(parameter)
        assert torch.equal(before[name][1], parameter)


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    config = AutoConfig.for_model(**{**SMALL, **FAMILIES["llama"], "hidden_act": "mish"})
    model = AutoModelForCausalLM.from_config(config).eval()
    setting = model.config._attn_implementation
    with pytest.raises(tpcompile.UnsupportedError):
        capture(model)
    assert model.config._attn_implementation == setting


def test_no_weights_are_made_for_a_preset() -> None:
    """No weights are allocated for a preset: the graph has shapes only, even of 72B parameters."""
    captured = capture("preset:qwen2.5-72b")
    assert all(p.is_meta for p in captured.graph.parameters())
    assert len(parameters_by_layer(captured.graph)) == 80


def parameters_by_layer(gm: fx.GraphModule) -> set[int]:
    layers = {origin_of(node).layer for node in parameters(gm.graph)}
    return {layer for layer in layers if layer is not None}


def test_nothing_is_keyed_to_names() -> None:
    """A model with renamed attributes compiles to the same ops and shards."""
    config = family("llama")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in model.model.layers:
        mlp = layer.mlp
        layer.add_module("thing", mlp)
        del layer.mlp
        layer.__class__ = _renamed(type(layer))
    known = family_pair("llama").captured
    captured = capture(model)
    renamed, _ = run_passes(captured.graph, default_pipeline(3))
    plain, _ = run_passes(known.graph, default_pipeline(3))
    assert [n.target for n in renamed.graph.nodes if n.op == "call_function"] == [
        n.target for n in plain.graph.nodes if n.op == "call_function"
    ]
    assert "model.layers.0.thing.gate_proj.weight" in captured.tensors


def _renamed(kind: type) -> type:
    """Return a subclass of the layer that looks up `mlp` under the new name."""
    return type(kind.__name__, (kind,), {"mlp": property(lambda self: self.thing)})
