"""The text model of a checkpoint that also holds a vision model is loaded, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import tpcompile
from tests.float8 import in_blocks
from tests.hybrids import VOCABULARY, lively_hybrid, random_config
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import listening
from tpcompile.errors import CheckpointError

HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
IDS = torch.arange(2, 20).reshape(2, 9) % VOCABULARY


def save(directory: Path, *, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model as the official directories are laid out; return its text model."""
    text = random_config(3, tie_word_embeddings=tied, partial_rotary_factor=0.25, **HEADS)
    eager = lively_hybrid(text).to(dtype)
    values = {**text.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    config = Qwen3_5Config(text_config=values, vision_config=VISION, tie_word_embeddings=tied)
    whole: Any = Qwen3_5ForConditionalGeneration(config).to(dtype)
    whole.model.language_model.load_state_dict(eager.model.state_dict())
    whole.lm_head.load_state_dict(eager.lm_head.state_dict())
    whole.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in weights)
    assert any(name.startswith("model.language_model.layers.") for name in weights)
    weights["mtp.fc.weight"] = torch.ones(2, 2)
    weights["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)
    if tied:
        weights.pop("lm_head.weight", None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return eager


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_text_model_is_loaded(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    eager = save(tmp_path, tied=tied, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(theirs).__name__ == "Qwen3_5ForCausalLM" and theirs.dtype == dtype
    with torch.inference_mode():
        expected = eager(IDS).logits
        assert relative_error(theirs(IDS).logits.float(), expected.float()) < TOLERANCE
    with listening("tpcompile.frontend.source") as heard:
        model = tpcompile.compile(tmp_path, tp=2, simulate=True, backend="torch")
    with model:
        logits = model(IDS).logits
        near = TOLERANCE if dtype == torch.float32 else 0.05
        assert logits.dtype == dtype and relative_error(logits.float(), expected.float()) < near
        assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert "of a qwen3_5, only the text model is used" in heard


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_8_bits(weight: torch.Tensor, method: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what a checkpoint holds of a weight in 8 bits, and the values of that."""
    if method == "fp8":
        numbers, scales, values = in_blocks(weight, (128, 128), torch.float32)
        return {"weight": numbers, "weight_scale_inv": scales}, values
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers * scales


@pytest.mark.parametrize(
    ("scheme", "ignored"),
    [
        (FP8, "modules_to_not_convert"),
        (COMPRESSED, "ignore"),
        (COMPRESSED, "ignore, as a regular expression"),
    ],
    ids=["fp8", "compressed-tensors", "by a regular expression"],
)
def test_linears_that_are_not_quantized_have_the_names_of_the_whole_model(
    scheme: dict[str, Any], ignored: str, tmp_path: Path
) -> None:
    eager = save(tmp_path, tied=False)
    path, prefix = tmp_path / "model.safetensors", "model.language_model.layers.0."
    weights = load_file(path)
    for name, linear in eager.named_modules():
        stored = name.replace("model.layers.", "model.language_model.layers.")
        if isinstance(linear, nn.Linear) and stored != name and not stored.startswith(prefix):
            parts, values = in_8_bits(linear.weight.data, str(scheme["quant_method"]))
            linear.weight.data.copy_(values)
            weights |= {f"{stored}.{part}": value for part, value in parts.items()}
    save_file(weights, path, metadata={"format": "pt"})
    left = [name for name in weights if name.startswith(prefix)]
    left = ["lm_head", *(name.removesuffix(".weight") for name in left)]
    option, _, by_regex = ignored.partition(",")
    if by_regex:
        left = ["lm_head", r"re:model\.language_model\.layers\.0\..*"]
    file = tmp_path / "config.json"
    text = json.loads(file.read_text()) | {"quantization_config": {**scheme, option: left}}
    file.write_text(json.dumps(text))
    with torch.inference_mode():
        expected = eager(IDS).logits
    with tpcompile.compile(tmp_path, tp=2, simulate=True, backend="torch") as model:
        assert relative_error(model(IDS).logits, expected) < TOLERANCE


def test_a_directory_with_a_text_model_alone(tmp_path: Path) -> None:
    for tied in (True, False):
        eager = lively_hybrid(random_config(3, tie_word_embeddings=tied, **HEADS))
        eager.save_pretrained(tmp_path / str(tied))
        with torch.inference_mode():
            expected = eager(IDS).logits
        with tpcompile.compile(tmp_path / str(tied), tp=2, simulate=True, backend="torch") as model:
            assert relative_error(model(IDS).logits, expected) < TOLERANCE


def test_a_missing_or_unknown_tensor_is_named_as_always(tmp_path: Path) -> None:
    save(tmp_path, tied=False)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.language_model.layers.0.linear_attn.A_log"
    held = weights.pop(name)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.linear_attn\.A_log"):
        tpcompile.compile(tmp_path, simulate=True, backend="torch")
    save_file({**weights, name: held, "model.extra": held.clone()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.extra"):
        tpcompile.compile(tmp_path, simulate=True, backend="torch")


def test_settings_of_the_whole_checkpoint_count(tmp_path: Path) -> None:
    """A dtype that only the outer configuration has is that of the text model."""
    save(tmp_path, tied=True)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"].pop("dtype", None)
    values["dtype"] = "bfloat16"
    path.write_text(json.dumps(values))
    with tpcompile.compile(tmp_path, simulate=True, backend="torch") as model:
        assert model(IDS).logits.dtype == torch.bfloat16
