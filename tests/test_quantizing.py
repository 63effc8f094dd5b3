"""Tests of `quantize`: the directory, what loads it, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tpcompile
from tests.models import TOLERANCE, relative_error
from tests.quantized import write_quantised
from tests.runtime.test_quantizing import IDS, made_model
from tpcompile.quantizing import QuantizedCheckpoint

pytestmark = pytest.mark.usefixtures("captured_once")
Quantised = tuple[Path, QuantizedCheckpoint]
HEADS = [("int4:48", "int8"), ("int8:48", "keep"), ("int4:row", "int4")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bf16 with a tied head and a tokenizer's files."""
    path = tmp_path_factory.mktemp("plain")
    made_model(torch.bfloat16).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not copied")
    return path


@pytest.mark.parametrize(("weights", "head"), HEADS)
def test_the_directory_is_the_compiled_model(
    directory: Path, tmp_path: Path, weights: str, head: str | None
) -> None:
    """A compiled model saves the same files, and transformers loads the same numbers."""
    output, saved = tmp_path / "made", tmp_path / "saved"
    report = tpcompile.quantize(str(directory), weights, output, head=head)
    options: dict[str, Any] = {"backend": "torch", "simulate": True}
    with tpcompile.compile(str(directory), tp=2, weights=weights, head=head, **options) as compiled:
        compiled.save_pretrained(saved)
    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad(), tpcompile.compile(str(output), dtype="float32", **options) as compiled:
        wanted = load(output, dtype=torch.float32).eval()(IDS).logits
        assert relative_error(compiled(IDS).logits, wanted) < TOLERANCE
    tensors = load_file(output / "model.safetensors")
    assert (output / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((output / name).read_text()) == json.loads((saved / name).read_text())
    assert (output / "tokenizer.json").is_file() and not (output / "README.md").exists()
    assert report.bytes_after == sum(tensor.nbytes for tensor in tensors.values())
    assert ("lm_head.weight_packed" in tensors) == (head != "keep")
    original = load_file(directory / "model.safetensors")
    unchanged = original.keys() & tensors.keys()
    assert "model.embed_tokens.weight" in unchanged and "lm_head.weight" not in tensors
    assert all(torch.equal(original[name], tensors[name]) for name in unchanged)


@pytest.fixture(scope="module")
def quantised(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    output = tmp_path_factory.mktemp("quantised")
    tokens = IDS.flatten().tolist()
    return output, tpcompile.quantize(str(directory), "int4:48", output, tokens=tokens)


def test_report(directory: Path, quantised: Quantised) -> None:
    output, report = quantised
    plain = load_file(directory / "model.safetensors")
    assert report.bytes_before == sum(tensor.nbytes for tensor in plain.values())
    names = {layer.name for layer in report.layers}
    assert len(names) == 15 and "lm_head.weight" in names
    for layer in report.layers:
        head = layer.name == "lm_head.weight"
        assert layer.format == ("int8:48:bf16" if head else "int4:48:bf16")
        assert (0.002 < layer.rel_error < 0.01) if head else (0.05 < layer.rel_error < 0.12)
    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before, after = (
            load(path, dtype=torch.float32).eval()(IDS.flatten()[None]).logits[0].double()
            for path in (directory, output)
        )
    logits_error = report.logits
    assert logits_error is not None and logits_error.tokens == IDS.numel()
    assert logits_error.max_abs == pytest.approx(float((after - before).abs().max()), rel=1e-3)
    assert logits_error.mean_abs == pytest.approx(float((after - before).abs().mean()), rel=1e-3)
    logs = [logits.log_softmax(-1) for logits in (before, after)]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert logits_error.kl == pytest.approx(float(kl), rel=1e-2, abs=1e-7)
    assert logits_error.top1 == float((before.argmax(-1) == after.argmax(-1)).double().mean())


def test_several_files(directory: Path, quantised: Quantised, tmp_path: Path) -> None:
    tpcompile.quantize(str(directory), "int4:48", tmp_path, max_shard_size="50KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and (tmp_path / "model.safetensors.index.json").is_file()
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(quantised[0] / "model.safetensors")
    assert whole.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole.items())


def test_a_model_in_memory(tmp_path: Path) -> None:
    model = made_model(tie_word_embeddings=False)
    report = tpcompile.quantize(model, "int8:48", tmp_path, tokens=[1, 2, 3])
    assert report.logits is not None and report.logits.top1 == 1
    with tpcompile.compile(str(tmp_path), backend="torch") as compiled, torch.no_grad():
        assert relative_error(compiled(IDS).logits, model(IDS).logits) < 0.05


@pytest.mark.parametrize("case", ["a full directory", "quantized", "configuration", "ids", "size"])
def test_refusals(directory: Path, tmp_path: Path, case: str) -> None:
    """Nothing is left over."""
    source, output = str(directory), tmp_path / "made"
    more: dict[str, Any] = {}
    message = {
        "a full directory": "is not empty",
        "quantized": "quantized already",
        "configuration": "no weights",
        "ids": "ids below 101",
        "size": "max_shard_size must be",
    }[case]
    if case == "a full directory":
        output.mkdir()
        (output / "a").touch()
    elif case == "quantized":
        write_quantised(tmp_path / "source")
        source = str(tmp_path / "source")
    elif case == "configuration":
        source = "preset:tiny-qwen3"
    elif case == "ids":
        more = {"tokens": [5, 101]}
    else:
        more = {"max_shard_size": "five"}
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(tpcompile.CompileError, match=message):
        tpcompile.quantize(source, "int4:16", output, **more)
    assert {path.name for path in tmp_path.iterdir()} == before
