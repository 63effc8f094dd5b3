"""Checkpoints of block FP8, from their files to logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import tpcompile
from tests.captures import captured_once as capture
from tests.float8 import write_fp8
from tests.logits import IDS, check_logits, in_turn
from tests.models import TOLERANCE, relative_error
from tests.quantized import rewritten
from tpcompile.errors import CheckpointError, UnsupportedError, UsageError

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 384}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks that end with the weight": ("fp8:128:f32", WIDE),
    # Of three ranks, the second has columns of two blocks.
    "blocks that ranks cut": (
        "fp8:128:f32",
        {"hidden_size": 272, "num_attention_heads": 17, "num_key_value_heads": 1},
    ),
    "blocks larger than weights, scales in bf16": ("fp8:128:bf16", {"scales": torch.bfloat16}),
    "small blocks, with biases": ("fp8:32:f32", {"name": "tiny-qwen2", "block": (48, 32)}),
    "one scale per weight": ("fp8:row:f32", {"block": None}),
    "some in bf16": (
        "fp8:64:f32",
        {"block": (64, 64), "left": ("lm_head", "down_proj"), "tie_word_embeddings": False},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, str]:
    directory, (word, changes) = tmp_path_factory.mktemp("fp8"), CASES[request.param]
    return directory, write_fp8(directory, **changes), word


@pytest.mark.parametrize(("checkpoint", "backend", "tp"), in_turn(CASES), indirect=["checkpoint"])
def test_logits(checkpoint: tuple[Path, Any, str], backend: str, tp: int) -> None:
    directory, truth, _ = checkpoint
    check_logits(directory, truth, backend, tp)


def test_the_format_of_weights(checkpoint: tuple[Path, Any, str]) -> None:
    directory, _, word = checkpoint
    tensors = capture(str(directory)).tensors
    assert {str(tensor.format) for tensor in tensors.values() if tensor.format} == {word}


@pytest.mark.parametrize("tp", [1, 3])
def test_saved_tensors(checkpoint: tuple[Path, Any, str], tmp_path: Path, tp: int) -> None:
    """A compiled model saves the tensors that it read."""
    directory, _, _ = checkpoint
    with tpcompile.compile(str(directory), tp=tp, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor.float(), before[name].float()), name
    schemes = [json.loads((path / "config.json").read_text()) for path in (directory, tmp_path)]
    assert schemes[0]["quantization_config"] == schemes[1]["quantization_config"]


def test_ranks_in_processes(tmp_path: Path) -> None:
    truth = write_fp8(tmp_path, **WIDE)
    with torch.no_grad():
        wanted = truth(IDS).logits
    with tpcompile.compile(str(tmp_path), tp=2, dtype=torch.float32) as model:
        assert relative_error(model(IDS).logits, wanted) < TOLERANCE


def test_tokens_of_hugging_face(tmp_path: Path) -> None:
    """Transformers decodes the same files, if sizes are multiples of those of blocks."""
    write_fp8(tmp_path, block=(64, 64), **WIDE)
    load: Any = AutoModelForCausalLM.from_pretrained
    scheme = FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)
    eager = load(tmp_path, quantization_config=scheme, dtype=torch.float32).float()
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        wanted, logits = eager.generate(IDS[:1], **options), eager(IDS).logits
    with tpcompile.compile(str(tmp_path), dtype=torch.float32, backend="native") as model:
        assert relative_error(model(IDS).logits, logits) < TOLERANCE
        assert torch.equal(model.generate(IDS[:1], **options), wanted)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    write_fp8(directory, block=(64, 64))
    return directory


def test_nan_is_refused(written: Path, tmp_path: Path) -> None:
    """Kernels take these bits for a number."""
    name = "model.layers.0.mlp.up_proj.weight"
    numbers = load_file(written / "model.safetensors")[name]
    numbers.view(torch.uint8)[3, 5] = 0xFF
    directory = rewritten(written, tmp_path / "made", **{name: numbers})
    with pytest.raises(CheckpointError, match="weight holds NaN"):
        tpcompile.compile(str(directory))


def test_scales_of_another_shape(written: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    scales = load_file(written / "model.safetensors")[name]
    directory = rewritten(written, tmp_path / "made", **{name: scales.T.contiguous()})
    with pytest.raises(CheckpointError, match=f"shape of the tensor {name} does not match"):
        tpcompile.compile(str(directory))


def test_integers_for_activations(written: Path) -> None:
    with pytest.raises(UsageError, match="Only linears with integers as weights"):
        tpcompile.compile(str(written), activations="int8")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("scale_fmt", "ue8m0"),
        ("modules_to_convert", ["embed_tokens"]),
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 128]),
        ("weight_block_size", [128, 1 << 15]),
        ("weight_block_size", "128"),
        ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", ["*"]),
    ],
)
def test_schemes_that_are_not_read(written: Path, tmp_path: Path, name: str, value: object) -> None:
    directory = rewritten(written, tmp_path / "made")
    text = json.loads((directory / "config.json").read_text())
    text["quantization_config"][name] = value
    (directory / "config.json").write_text(json.dumps(text))
    with pytest.raises(UnsupportedError, match=rf"quantization_config\.{name}"):
        tpcompile.compile(str(directory))
