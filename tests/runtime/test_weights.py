"""Tests of the sources of weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.captures import captured_once
from tests.models import preset_pair, scaled_config
from tpcompile.errors import CheckpointError
from tpcompile.runtime.weights import RandomWeights, weights_of


def test_a_seed_always_gives_the_same_weights() -> None:
    captured = preset_pair("tiny-qwen2").captured
    first, second, other = (RandomWeights(captured, seed) for seed in (3, 3, 4))
    for name in captured.tensors:
        assert torch.equal(first.whole(name), second.whole(name))
        assert not torch.equal(first.whole(name), other.whole(name))


def test_parts_are_parts_of_the_whole() -> None:
    captured = preset_pair("tiny-qwen2").captured
    read = RandomWeights(captured, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(read(name, (slice(3, 9), slice(0, 5))), read.whole(name)[3:9, :5])


def test_nothing_is_trivially_zero_or_one() -> None:
    """Random biases are not 0 and scales not 1, which would hide that they are lost."""
    captured = preset_pair("tiny-qwen2").captured
    read = RandomWeights(captured, 0)
    bias = read.whole("model.layers.0.self_attn.q_proj.bias")
    scale = read.whole("model.layers.0.input_layernorm.weight")
    assert 0.005 < bias.std() < 0.05
    assert abs(bias.mean()) < 0.01
    assert 0.05 < scale.std() < 0.2
    assert abs(scale.mean() - 1) < 0.1


def test_a_model_in_memory_is_read_in_place() -> None:
    model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b")).eval()
    read = weights_of(captured_once(model), model, None)
    part = read("model.norm.weight", (slice(0, 4),))
    assert part.untyped_storage().data_ptr() == model.model.norm.weight.data_ptr()


@pytest.mark.parametrize("source", ["random", "model"])
def test_a_tensor_that_is_not_there(source: str) -> None:
    pair = preset_pair("tiny-qwen2")
    read = RandomWeights(pair.captured, 0) if source == "random" else pair.read
    with pytest.raises(CheckpointError, match="no tensor"):
        read("model.nothing", (slice(0, 1),))


def test_a_configuration_has_no_weights() -> None:
    with pytest.raises(CheckpointError, match="random_weights"):
        weights_of(preset_pair("tiny-qwen2").captured, "preset:tiny-qwen2", None)


def test_a_model_without_storage_has_no_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b")).eval()
    with pytest.raises(CheckpointError, match="meta"):
        weights_of(captured_once(model), model, None)
