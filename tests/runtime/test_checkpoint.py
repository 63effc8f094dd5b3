"""Checkpoints of all formats are read slice by slice, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once
from tests.models import TOLERANCE, padded, preset_pair, relative_error, scaled_config
from tpcompile.checkpoint_files import INDEX, SINGLE
from tpcompile.runtime.checkpoint import Checkpoint
from tpcompile.runtime.weights import directory_of

UP = "model.layers.1.mlp.up_proj.weight"


def saved(directory: Path, name: str = "qwen2.5-0.5b", **options: Any) -> Path:
    """Save a scaled preset with Hugging Face."""
    preset_pair(name).eager.save_pretrained(directory, **options)
    return directory


def opened(directory: Path) -> Checkpoint:
    captured = captured_once(directory)
    return Checkpoint(directory, captured.tensors, captured.aliases)


def rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2.5-0.5b", {}),
        ("qwen2.5-0.5b", {"max_shard_size": "60KB"}),
        ("qwen3-8b", {"max_shard_size": "60KB"}),
        ("tiny-qwen3.5", {"max_shard_size": "60KB"}),
    ],
    ids=["one file, tied", "sharded, tied", "sharded, untied", "hybrid"],
)
def test_a_checkpoint_compiles_to_eager(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, name, **options)
    assert (tmp_path / INDEX).is_file() == bool(options)
    ids, mask = padded((4, 9))
    backend = "torch" if "3.5" in name else "auto"
    with tpcompile.compile(str(tmp_path), tp=3, simulate=True, backend=backend) as model:
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        gathered = model.gather_weight(UP)
    eager = preset_pair(name).eager
    with torch.inference_mode():
        expected = eager(ids, attention_mask=mask).logits[mask.bool()]
    assert relative_error(logits, expected) < TOLERANCE
    assert torch.equal(gathered, eager.get_parameter(UP))


def test_a_head_that_is_stored_though_it_is_tied(tmp_path: Path) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> None:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    checkpoint = opened(rewritten(saved(tmp_path), untie))
    expected = preset_pair("qwen2.5-0.5b").eager.model.embed_tokens.weight
    rows = checkpoint("model.embed_tokens.weight", (slice(3, 8), slice(None)))
    assert torch.equal(rows, expected[3:8])


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    """A stored tied head is ignored if it equals the embedding, and refused if it differs."""
    name, values = "model.embed_tokens.weight", preset_pair("qwen2.5-0.5b").eager.lm_head.weight
    head = {"lm_head.weight": values.detach().clone()}
    saved(tmp_path)
    captured = preset_pair("qwen2.5-0.5b").captured
    rewritten(tmp_path, lambda tensors: tensors.update(head))
    with Checkpoint(tmp_path, captured.tensors, captured.aliases) as checkpoint:
        assert torch.equal(checkpoint(name, (slice(None),)), values)
    head["lm_head.weight"][-1, -1] += 1
    rewritten(tmp_path, lambda tensors: tensors.update(head))
    eager = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(eager.lm_head.weight, eager.model.embed_tokens.weight)
    checkpoint = Checkpoint(tmp_path, captured.tensors, captured.aliases)
    with (
        checkpoint,
        pytest.raises(tpcompile.CheckpointError, match="but are stored with different"),
    ):
        checkpoint(name, (slice(None),))


NOT_WEIGHTS = {
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("stored", NOT_WEIGHTS)
@pytest.mark.parametrize("name", [UP, "lm_head.weight"])
def test_stored_dtypes_that_are_refused(name: str, stored: str, tmp_path: Path) -> None:
    """Stored dtypes that cannot be cast meaningfully are refused by name."""
    captured = preset_pair("qwen2.5-0.5b").captured

    def cast(tensors: dict[str, torch.Tensor]) -> None:
        source = tensors[UP if name == UP else "model.embed_tokens.weight"]
        tensors[name] = source.to(NOT_WEIGHTS[stored])

    rewritten(saved(tmp_path), cast)
    with pytest.raises(
        tpcompile.CheckpointError, match=rf"{name} must have.*Found {stored}\."
    ) as e:
        Checkpoint(tmp_path, captured.tensors, captured.aliases)
    assert "Expected F64, F32, F16, BF16" in str(e.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(scaled_config("qwen3-0.6b"), dtype=dtype).eval()
    model.save_pretrained(tmp_path)
    with tpcompile.compile(tmp_path, tp=2, simulate=True) as compiled:
        assert torch.equal(compiled.gather_weight(UP), model.get_parameter(UP))
    with tpcompile.compile(tmp_path, tp=2, dtype="float32", simulate=True) as widened:
        assert torch.equal(widened.gather_weight(UP), model.get_parameter(UP).float())


def test_fused_tensors_are_taken_apart_before_they_are_sharded(tmp_path: Path) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in ("model.layers.0", "model.layers.1"):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"{layer}.self_attn.{p}_proj.{kind}") for p in "qkv"]
                tensors[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
            parts = [tensors.pop(f"{layer}.mlp.{p}_proj.weight") for p in ("gate", "up")]
            tensors[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)

    rewritten(saved(tmp_path), fuse)
    eager = preset_pair("qwen2.5-0.5b").eager
    with tpcompile.compile(tmp_path, tp=4, simulate=True) as model:
        for name, parameter in eager.named_parameters():
            assert torch.equal(model.gather_weight(name), parameter), name


def test_only_the_slices_of_a_rank_are_read(tmp_path: Path) -> None:
    """Rows of other ranks, which are NaN in the file, are not read."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][:100] = float("nan")

    checkpoint = opened(rewritten(saved(tmp_path), poison))
    rows = checkpoint._shapes[UP][0]
    assert not checkpoint(UP, (slice(100, rows), slice(None))).isnan().any()
    assert checkpoint(UP, (slice(99, rows), slice(None))).isnan().any()


def _cut_short(directory: Path) -> None:
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[: len(data) // 2])


def _header_only(directory: Path) -> None:
    (directory / SINGLE).write_bytes((directory / SINGLE).read_bytes()[:100])


def _empty_file(directory: Path) -> None:
    (directory / SINGLE).write_bytes(b"")


def _no_files(directory: Path) -> None:
    (directory / SINGLE).unlink()


def _old_format(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


def _edited(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        rewritten(directory, change)

    return edit


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (_cut_short, "may be truncated"),
    "cut in the header": (_header_only, "may be truncated"),
    "empty": (_empty_file, "may be truncated"),
    "no files": (_no_files, "no weights"),
    "the old format": (_old_format, "save_pretrained"),
    "a missing tensor": (_edited(lambda t: t.pop(UP)), f"lacks the tensor {UP}"),
    "a missing embedding": (
        _edited(lambda t: t.pop("model.embed_tokens.weight")),
        "model.embed_tokens.weight or lm_head.weight",
    ),
    "another shape": (
        _edited(lambda t: t.update({UP: t[UP][:-1].clone()})),
        "does not match the configuration",
    ),
    "an unexpected tensor": (
        _edited(lambda t: t.update({"model.layers.9.thing": torch.zeros(1)})),
        r"the model does not have: model\.layers\.9\.thing",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    fault, message = FAULTS[name]
    fault(saved(tmp_path))
    with pytest.raises(tpcompile.CheckpointError, match=message) as caught:
        tpcompile.compile(tmp_path, tp=2, simulate=True)
    assert str(tmp_path) in str(caught.value)


def _drop_file(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def _break_index(directory: Path) -> None:
    (directory / INDEX).write_text("{")


def _other_index(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    first, *_ = index["weight_map"].values()
    index["weight_map"] = {**index["weight_map"], "model.norm.wight": first}
    (directory / INDEX).write_text(json.dumps(index))


SHARDED_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing file": (_drop_file, r"lacks the file model-00002"),
    "a broken index": (_break_index, "index of the checkpoint"),
    "an index of another checkpoint": (_other_index, "its file lacks"),
}


@pytest.mark.parametrize("name", SHARDED_FAULTS)
def test_faults_of_sharded_checkpoints(name: str, tmp_path: Path) -> None:
    fault, message = SHARDED_FAULTS[name]
    fault(saved(tmp_path, max_shard_size="60KB"))
    with pytest.raises(tpcompile.CheckpointError, match=message):
        tpcompile.compile(tmp_path, tp=2, simulate=True)


def test_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    with opened(rewritten(saved(tmp_path), lambda tensors: tensors.update(extra))) as checkpoint:
        assert checkpoint(UP, (slice(0, 2), slice(0, 3))).shape == (2, 3)
        with pytest.raises(tpcompile.CheckpointError, match="no tensor"):
            checkpoint("model.layers.0.nothing", (slice(0, 1),))


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert directory_of(str(tmp_path)) == tmp_path
