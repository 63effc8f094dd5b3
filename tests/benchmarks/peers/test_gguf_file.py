"""The files that the benchmark writes for llama.cpp hold the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.peers.gguf_file import write_gguf
from tests.hybrids import lively_hybrid
from tests.logits import check_logits
from tpcompile.presets import preset


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_the_model_of_a_file(tmp_path: Path, name: str) -> None:
    values = preset(name)
    if "linear_num_value_heads" in values:
        values["linear_num_value_heads"] = values["linear_num_key_heads"]
    model = lively_hybrid(AutoConfig.for_model(**values))
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    check_logits(tmp_path / "model.gguf", model, "torch", 2)
