"""Checkpoints with random weights can be read by all sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks import checkpoint as under_test
from benchmarks.checkpoint import write_checkpoint


def test_several_files_hold_every_tensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(under_test, "FILE_BYTES", 100_000)
    written = write_checkpoint(tmp_path, "tiny-qwen3", seed=3)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    names = [name for file in files for name in _names(file)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(names) == sorted(set(names)) == sorted(index["weight_map"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert sum(p.nbytes for p in model.parameters()) == written.weight_bytes
    assert written.largest_slice(1) == max(p.nbytes for p in model.parameters())
    assert written.largest_slice(2) == 507 * 64 * 4
    assert float(model.model.layers[1].mlp.up_proj.weight.detach().std()) == pytest.approx(
        0.02, rel=0.1
    )
    assert (written.layers, written.vocabulary, written.dtype) == (2, 1013, torch.float32)


def test_refuses_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(under_test.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"tiny-qwen3 needs 0\.0 GB"):
        write_checkpoint(tmp_path, "tiny-qwen3")
    assert not list(tmp_path.iterdir())


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
