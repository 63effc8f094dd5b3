"""Adapters that cannot be merged are refused by name, with what to do."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import tpcompile
from tests.adapters import adapter, base_model
from tests.expert_models import mixture
from tests.quantized import write_quantised
from tpcompile.checkpoint_files import ADAPTER, ADAPTER_WEIGHTS
from tpcompile.errors import CompileError
from tpcompile.presets import preset
from tpcompile.runtime.adapter_config import _Config

pytestmark = pytest.mark.usefixtures("captured_once")

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    return base_model(config, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(base, tmp_path_factory.mktemp("plain"), r=4, target_modules=["q_proj"])


def _refused(model: Any, path: Any, **options: Any) -> str:
    with pytest.raises(CompileError) as caught:
        tpcompile.compile(model, 2, simulate=True, adapter=path, **options)
    return str(caught.value)


SETTINGS = {
    "use_dora": (True, r"DoRA \(use_dora\) is not supported"),
    "lora_bias": (True, r"biases of its own \(lora_bias\)"),
    "fan_in_fan_out": (True, "transposed weights"),
    "modules_to_save": (["embed_tokens"], "whole modules"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "parameters of experts"),
    "trainable_token_indices": ([1, 2], "rows of the embedding"),
    "layer_replication": ([[0, 1], [0, 2]], "replicated layers"),
    "alora_invocation_tokens": ([1], "activated LoRA"),
    "bias": ("all", "changes biases"),
    "init_lora_weights": ("pissa", "changes its base model.*init_lora_weights='pissa'"),
    "peft_type": ("LOHA", "must be a LoRA, got peft_type 'LOHA'"),
    "r": ("many", "not valid.*the rank 'many'"),
    "lora_alpha": ([], "not valid"),
    "rank_pattern": ({"q_proj": 0}, "the rank 0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(base: Path, plain: Path, tmp_path: Path, name: str) -> None:
    value, pattern = SETTINGS[name]
    path = shutil.copytree(plain, tmp_path / "adapter")
    config = json.loads((path / ADAPTER).read_text())
    (path / ADAPTER).write_text(json.dumps({**config, name: value}))
    message = _refused(str(base), path)
    assert re.search(pattern, message), message


def _renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "an unknown module": (
        _renamed("layers.0.self_attn.q_proj", "layers.0.attn.c_attn"),
        r"changes model\.layers\.0\.attn\.c_attn, but the model has no such linear",
    ),
    "a layer too many": (_renamed("layers.1.", "layers.9."), r"changes model\.layers\.9"),
    "a norm": (_renamed("self_attn.q_proj", "input_layernorm"), "no such linear"),
    "a magnitude": (
        _renamed("layers.0.self_attn.q_proj.lora_A.weight", "q_proj.lora_magnitude_vector"),
        "q_proj.lora_magnitude_vector of the adapter cannot be merged",
    ),
    "an embedding": (
        _renamed("self_attn.q_proj.lora_A.weight", "embed_tokens.lora_embedding_A"),
        "lora_embedding_A of the adapter cannot be merged",
    ),
    "a whole head": (
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(1013, 64)}),
        r"lm_head\.weight of the adapter cannot be merged",
    ),
    "the tied head": (
        lambda tensors: tensors.update(
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(1013, 4),
            }
        ),
        r"changes lm_head, which is tied to model\.embed_tokens: both would change",
    ),
    "A without B": (
        lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight"),
        r"lacks lora_B of model\.layers\.0\.self_attn\.q_proj",
    ),
    "a wider model": (
        lambda tensors: tensors.update({f"{FIRST}.lora_A.weight": torch.ones(4, 96)}),
        r"shape of the adapter's lora_A .* Found \(4, 96\)\. Expected \(4, 64\)\. "
        "The adapter may belong to another base model",
    ),
    "another rank": (
        lambda tensors: tensors.update({f"{FIRST}.lora_B.weight": torch.ones(96, 8)}),
        r"shape of the adapter's lora_B",
    ),
    "no tensors": (lambda tensors: tensors.clear(), "has no tensors"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(base: Path, plain: Path, tmp_path: Path, case: str) -> None:
    change, pattern = TENSORS[case]
    path = shutil.copytree(plain, tmp_path / "adapter")
    tensors = load_file(path / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, path / ADAPTER_WEIGHTS)
    message = _refused(str(base), path)
    assert re.search(pattern, message), message


def test_files(base: Path, plain: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain, tmp_path / "adapter")
    assert "must be a directory with an adapter_config.json" in _refused(str(base), tmp_path)
    assert "must be the directory of an adapter, got int" in _refused(str(base), 3)
    (path / ADAPTER_WEIGHTS).write_bytes(b"nothing")
    assert "cannot be read" in _refused(str(base), path)
    (path / ADAPTER_WEIGHTS).unlink()
    assert f"lacks the file {ADAPTER_WEIGHTS}" in _refused(str(base), path)
    (path / ADAPTER).write_text("{")
    assert "configuration of the adapter cannot be read" in _refused(str(base), path)


def test_random_weights_have_no_adapter(plain: Path) -> None:
    message = _refused("preset:tiny-qwen3", plain, random_weights=0)
    assert "An adapter changes the weights of a checkpoint" in message


def test_the_adapter_as_a_model_says_how_to_pass_it(plain: Path, base: Path) -> None:
    path = shutil.copytree(base, plain.parent / "both", dirs_exist_ok=True)
    shutil.copy(plain / ADAPTER, path)
    with pytest.raises(CompileError, match="this directory as adapter=DIR"):
        tpcompile.compile(str(path), simulate=True)


def test_scales() -> None:
    config = _Config(
        8, 16, {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 32}, {"up_proj": 3}, False, ""
    )
    first, second = (f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1))
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 2
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 8
    assert (config.rank_of(first), config.rank_of(second)) == (8, 32)
    assert (config.scale_of(first), config.scale_of(second)) == (3 / 8, 3 / 32)
    assert config.rank_of("model.layers.11.mlp.up_proj") == 8
    stable = _Config(8, 16, {}, {}, True, "")
    assert stable.scale_of("q_proj") == 16 / math.sqrt(8)


@pytest.mark.parametrize("name", ["q_proj", "down_proj"])
def test_weights_of_few_bits(base: Path, tmp_path: Path, name: str) -> None:
    """A weight that the checkpoint stores in 16 bits or more may be changed beside them."""
    write_quantised(tmp_path / "int8", ignore=("lm_head", "model.layers.0.self_attn.q_proj"))
    path = adapter(base, tmp_path / "adapter", r=4, target_modules=[name], layers_to_transform=[0])
    if name == "q_proj":
        tpcompile.compile(
            str(tmp_path / "int8"), 2, simulate=True, adapter=path, backend="torch"
        ).close()
        return
    message = _refused(str(tmp_path / "int8"), path)
    assert "changes model.layers.0.mlp.down_proj, which the checkpoint stores in int8" in message
    assert "Compile the original checkpoint with this adapter" in message
    assert 'weights="int8"' in message


def test_experts(tmp_path: Path, plain: Path) -> None:
    mixture().save_pretrained(tmp_path / "base")
    path = shutil.copytree(plain, tmp_path / "adapter")
    tensors = load_file(path / ADAPTER_WEIGHTS)
    _renamed("self_attn.q_proj", "mlp.experts.2.up_proj")(tensors)
    save_file(tensors, path / ADAPTER_WEIGHTS)
    message = _refused(str(tmp_path / "base"), path)
    assert "changes model.layers.0.mlp.experts.2.up_proj: adapters of experts" in message
    assert "merge_and_unload()" in message
