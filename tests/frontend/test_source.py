"""Tests of all forms of MODEL, and of invalid models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tests.models import scaled_config
from tests.remote_code import add_code, answer_yes
from tpcompile.errors import CompileError
from tpcompile.frontend import UnreadWeightsError, capture, config_of
from tpcompile.frontend.source import module_of
from tpcompile.ir.info import info_of
from tpcompile.presets import DENSE, PRESETS


def test_a_directory_with_a_configuration(tmp_path: Path) -> None:
    scaled_config("qwen3-4b").save_pretrained(tmp_path)
    captured = capture(str(tmp_path))
    assert info_of(captured.graph).name == tmp_path.name
    assert capture(tmp_path).config.hidden_size == captured.config.hidden_size


@pytest.mark.parametrize("name", DENSE)
def test_presets_are_accepted_by_hugging_face(name: str) -> None:
    config = AutoConfig.for_model(**PRESETS[name])
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters["rope_theta"] == 1_000_000.0
    assert config.num_attention_heads % config.num_key_value_heads == 0


CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an encoder": ({"model_type": "bert"}, tpcompile.UnsupportedError, "is an encoder"),
    "an encoder-decoder": ({"model_type": "t5"}, tpcompile.UnsupportedError, "decoder-only"),
    "a vision model": ({"model_type": "vit"}, tpcompile.UnsupportedError, "decoder-only"),
    "text and vision": ({"model_type": "qwen2_vl"}, tpcompile.UnsupportedError, "decoder-only"),
    "no rotary": ({"model_type": "gpt2"}, tpcompile.UnsupportedError, "rotary"),
    "a state space": ({"model_type": "mamba"}, tpcompile.UnsupportedError, "attention"),
    "experts": ({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64},
                tpcompile.UnsupportedError, "router"),
    "quantized": (
        {"model_type": "qwen2", "quantization_config": {"quant_method": "awq", "bits": 4}},
        tpcompile.UnsupportedError, "quantized like this",
    ),
    "unknown kind": ({"model_type": "no-such-model"}, tpcompile.CaptureError, "no-such-model"),
    "missing kind": ({"hidden_size": 8}, tpcompile.CaptureError, "model_type"),
    "heads that do not divide": (
        {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 7, "head_dim": None},
        tpcompile.CaptureError, "could not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_other_kinds_are_refused(name: str, tmp_path: Path) -> None:
    values, error, message = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(error, match=message) as caught:
        capture(str(tmp_path))
    assert "\n\n" not in str(caught.value)


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        name: ({"quant_method": name}, f"quantized with {name}, which tpcompile does not read")
        for name in (
            *("bitsandbytes", "hqq", "quanto", "torchao", "mxfp4", "exl2", "aqlm"),
            *("bitnet", "higgs", "modelopt", "auto-round"),
        )
    },
    "bitsandbytes without a method": ({"load_in_8bit": True}, "quantized with bitsandbytes"),
    "MLX": ({"group_size": 64, "bits": 4}, "quantized with MLX"),
    "no method": ({}, "an unnamed method"),
    "a method that is no name": ({"quant_method": 3}, "quantized with 3"),
    "another property": (
        {"quant_method": "gptq", "bits": 3},
        r"At quantization_config\.bits of a checkpoint quantized with gptq. Found 3.",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_method_of_a_quantized_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    scheme, message = METHODS[name]
    config = scaled_config("qwen3-0.6b")
    config.quantization_config = scheme
    config.save_pretrained(tmp_path)
    with pytest.raises(UnreadWeightsError, match=message) as caught:
        capture(str(tmp_path))
    assert 'weights="int4"' in str(caught.value)


def test_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(tpcompile.CaptureError, match="could not be read"):
        capture(str(tmp_path))


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(tpcompile.UsageError, match=r"config\.json"):
        capture(str(tmp_path))


def test_an_unknown_preset() -> None:
    with pytest.raises(tpcompile.UsageError, match=r"Did you mean qwen3-0\.6b"):
        capture("preset:qwen3-0.6")


def test_something_else_entirely() -> None:
    with pytest.raises(tpcompile.UsageError, match="MODEL cannot be a list"):
        capture([1, 2])


def test_a_model_in_training() -> None:
    model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b"))
    with pytest.raises(tpcompile.UsageError, match="training"):
        capture(model.train())


def test_a_model_whose_dtype_is_asked_to_change() -> None:
    model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b")).eval()
    with pytest.raises(tpcompile.UsageError, match="dtype"):
        capture(model, dtype=torch.bfloat16)


def test_a_model_without_a_head() -> None:
    model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b")).eval()
    with pytest.raises(tpcompile.UnsupportedError, match="head"):
        capture(model.model)


@pytest.mark.parametrize("activation", ["leaky_relu", "mish"])
def test_a_custom_activation_is_an_op_without_a_rule(activation: str) -> None:
    with pytest.raises(tpcompile.UnsupportedError, match=f"aten.{activation}") as caught:
        capture(scaled_config("qwen3-0.6b", hidden_act=activation))
    assert "model.layers.0.mlp.act_fn" in str(caught.value)
    assert "rule" in str(caught.value)


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = answer_yes(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil"}))
    mark = add_code(tmp_path, "config.json", **CODE)
    with pytest.raises(tpcompile.UnsupportedError, match=r"which tpcompile does not run.*'evil'"):
        capture(tmp_path)
    assert not mark.exists()
    assert stdin.tell() == 0


def test_a_known_type_is_loaded_without_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known model type is loaded without its remote code, as in Hugging Face by default."""
    stdin = answer_yes(monkeypatch)
    scaled_config("qwen3-0.6b").save_pretrained(tmp_path)
    mark = add_code(tmp_path, "config.json", **CODE)
    assert type(config_of(tmp_path)).__name__ == "Qwen3Config"
    assert type(module_of(tmp_path, None)).__name__ == "Qwen3ForCausalLM"
    assert not mark.exists()
    assert stdin.tell() == 0


def test_attention_from_the_hub_is_not_loaded() -> None:
    """An attention kernel from the Hub is not loaded, since ours replaces it."""
    config = scaled_config("qwen3-0.6b", attn_implementation="someone/kernel")
    assert config._attn_implementation == "someone/kernel"
    assert module_of(config, None).config._attn_implementation == "eager"
    assert config._attn_implementation == "someone/kernel"


BROKEN = {
    "invalid JSON": ("{", r"Found invalid JSON at line 1, column 2"),
    "not an object": ("[]", "Found a JSON list instead of an object"),
    "nested too deep to parse": ('{"a": ' + "[" * 100_000, "nested more than 100 levels"),
    "nested too deep to use": (
        '{"model_type": "qwen3", "a": ' + "[" * 300 + "]" * 300 + "}",
        "nested more than 100 levels",
    ),
    "a type that is a list": ('{"model_type": ["qwen3"]}', "could not be read"),
    "code and a type that is a list": (
        '{"model_type": ["qwen3"], "auto_map": {"AutoConfig": "evil.Config"}}',
        "does not run",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_configurations(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(tpcompile.CompileError, match=message):
        config_of(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a" * 5000, "a\0b"], ids=["id", "path", "end"])
def test_names_that_cannot_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(tpcompile.CompileError):
        config_of(name)


def test_a_module_without_parameters() -> None:
    with pytest.raises(CompileError, match="Module"):
        tpcompile.capture(nn.Module(), dtype=torch.float32)
