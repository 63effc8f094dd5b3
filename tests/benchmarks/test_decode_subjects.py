"""Subjects of the decode benchmark: sizes of GGUF files and checkpoints, and their names."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.decode_measured import Weights
from benchmarks.decode_subjects import names_of, of_directory, of_file
from tests.float8 import write_fp8
from tests.gguf_files import model_of, write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_a_file(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    model = write_gguf(path, model_of(tie_word_embeddings=tied))
    subject = of_file("m.gguf", path)
    assert (subject.layers, subject.vocabulary) == (2, 101)
    assert subject.dtype == torch.bfloat16 and subject.integers == "int8"
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert subject.held == sum(int(t.n_bytes) for t in tensors.values())
    counted = sum(parameter.numel() for parameter in model.parameters())
    if not tied:  # a step reads only rows of it
        embedding = tensors.pop("token_embd.weight")
        counted -= int(embedding.n_elements)
    assert subject.read == Weights(counted, sum(int(t.n_bytes) for t in tensors.values()))
    assert 8.5 < subject.read.bits < 10.5


def test_a_file_without_integers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model_of(), Kind.F16)
    subject = of_file("m.gguf", tmp_path / "m.gguf")
    assert subject.integers == "" and subject.dtype == torch.float16


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_8_bits(tmp_path: Path, tied: bool) -> None:
    """Rows have the scales of their blocks; the head and the norms stay in bf16."""
    config = write_fp8(tmp_path, block=(16, 16), tie_word_embeddings=tied).config
    subject = of_directory("fp8", tmp_path)
    table, norms = 101 * config.hidden_size, subject.layers * 2 * (config.hidden_size + 16)
    norms += config.hidden_size
    numbers = subject.read.count - table - norms
    assert subject.read.bytes == numbers * (1 + 4 / 16) + 2 * (table + norms)
    assert subject.held == subject.read.bytes + (0 if tied else 2 * table)


def test_names() -> None:
    assert names_of([Path("/a/b.gguf"), Path("/a/c.gguf")]) == ["b.gguf", "c.gguf"]
    assert names_of([Path("/a/b.gguf"), Path("/c/b.gguf")]) == ["/a/b.gguf", "/c/b.gguf"]
