"""`activations="int8"`, from the option to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompile
from tests.captures import captured_once
from tests.compressed import group, write_compressed
from tests.models import relative_error
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.model import compare_with_eager
from tpcompile.compare.program import Batch, compare_program
from tpcompile.frontend import capture, parse_graph
from tpcompile.frontend.stored import compressed
from tpcompile.ir.text import format_graph
from tpcompile.options import scheme_of
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.vm.program.text import format_program, parse_program

MODEL = "preset:tiny-qwen3"
IDS = torch.arange(1, 25).reshape(2, 12)
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 208}
"""The columns of down projections are not a multiple of 64, and two ranks cut their blocks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W8A8 checkpoint that compressed-tensors wrote, with offsets."""
    directory = tmp_path_factory.mktemp("w8a8")
    config_group = group(8, layout="int-quantized", symmetric=False, input_activations=DYNAMIC)
    write_compressed(directory, config_group, **SMALL)
    return directory


def formats(model: Any, **options: Any) -> set[str]:
    tensors = capture(model, **options).tensors.values()
    return {str(tensor.format) for tensor in tensors if tensor.format}


def test_activations_of_a_scheme_count_if_they_are_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(compressed.log, "warning", messages.append)
    assert formats(str(checkpoint)) == {"int8:row:f32:offsets"}
    assert formats(str(checkpoint), rounds=True) == {"int8:row:f32:offsets:a8"}
    without, rounding = messages
    assert "which tpcompile does with activations='int8' only" in without
    assert "tpcompile rounds them to int8, with a scale per token and block" in rounding


def row_of_activations(comparison: Comparison) -> float:
    """Return the error of int8 activations in a comparison of which all values agree."""
    assert comparison.first_divergence is None
    assert comparison.ok
    (row,) = [row for row in comparison.rows if row.node == "activations"]
    return row.error


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_checkpoint_beside_eager(checkpoint: Path, tp: int) -> None:
    """Eager rounds the inputs of its linears too. The error beside 16 bits is that of 8 bits."""
    comparison = compare_with_eager(
        str(checkpoint), default_pipeline(tp), rounds=True, simulate=True
    )
    assert 1e-4 < row_of_activations(comparison) < 5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_quantized_while_they_are_loaded(dtype: torch.dtype) -> None:
    scheme = scheme_of("int4:16", "int8")
    comparison = compare_with_eager(
        MODEL,
        default_pipeline(2),
        dtype=dtype,
        scheme=scheme,
        rounds=True,
        random_weights=0,
        simulate=True,
    )
    assert 1e-4 < row_of_activations(comparison) < 5e-2


@pytest.mark.parametrize("tp", [1, 3])
def test_programs_beside_eager_and_modules(checkpoint: Path, tp: int) -> None:
    comparison = compare_program(str(checkpoint), decode_pipeline(tp, 2, 8), Batch(), rounds=True)
    assert comparison.ok
    assert comparison.first_divergence is None


def test_without_the_option_nothing_is_rounded(checkpoint: Path) -> None:
    """A comparison in fp32 needs no further reference, and has no row for activations."""
    comparison = compare_with_eager(str(checkpoint), default_pipeline(2), simulate=True)
    assert comparison.ok
    assert not any(row.beside_fp32 or row.node == "activations" for row in comparison.rows)


def test_the_text_of_graphs_and_programs() -> None:
    """The format of a weight says whether its linear rounds, and so does its instruction."""
    captured = captured_once(MODEL, scheme=scheme_of("int8:32", "keep"), rounds=True)
    for passes in (default_pipeline(2), decode_pipeline(2)):
        for stage in run_passes(captured.graph, passes)[1]:
            text = format_graph(stage.graph)
            assert text.count(" as int8:32:f32:a8") >= 6
            assert text.count(" as ") == text.count(":a8")
            assert format_graph(parse_graph(text)) == text
    options: dict[str, Any] = {"tp": 2, "target": "cpu", "weights": "int8:32", "head": "keep"}
    step = tpcompile.schedule(MODEL, **options, activations="int8")
    written = format_program(step.program)
    assert "format=int8:32:f32:a8 first=" in written
    assert parse_program(written) == step.program
    plain = format_program(tpcompile.schedule(MODEL, **options).program)
    assert written.replace(":a8", "") == plain


def test_emitted_modules_and_the_reference_machine(checkpoint: Path) -> None:
    """Both generate tokens; no product of bf16 or fp32 weights changes."""
    tokens = []
    for backend in ("torch", "reference"):
        with tpcompile.compile(
            str(checkpoint), tp=2, simulate=True, backend=backend, activations="int8"
        ) as model:
            assert 'tpc.decoded("int8:row:f32:offsets:a8", ' in model.source(0)
            assert "tpc.linear(" in model.source(0)
            tokens.append(model.generate(IDS, max_new_tokens=6, do_sample=False))
            assert bool(model.steps.program) == (backend == "reference")
    assert tokens[0].shape == tokens[1].shape


def test_the_option_changes_logits_a_little(checkpoint: Path) -> None:
    logits = []
    for activations in ("16", "int8"):
        with tpcompile.compile(str(checkpoint), backend="torch", activations=activations) as model:
            logits.append(model(IDS).logits)
    assert 1e-4 < relative_error(logits[1], logits[0]) < 1e-1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Only linears with integers as weights round activations, and this model has none"),
        ({"activations": "int4", "weights": "int8"}, r"must be one of 16, int8, got 'int4'"),
        ({"activations": 8, "weights": "int8"}, r"must be one of 16, int8, got 8"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    options = {"activations": "int8", **options}
    with pytest.raises(tpcompile.UsageError, match=message):
        tpcompile.compile(MODEL, random_weights=0, simulate=True, **options)


def test_the_triton_backend_refuses() -> None:
    pytest.importorskip("triton")
    with pytest.raises(tpcompile.UnsupportedError, match="cannot read weights in int8:64:bf16:a8"):
        tpcompile.compile(
            MODEL,
            random_weights=0,
            backend="triton",
            dtype="bfloat16",
            weights="int8",
            activations="int8",
        )
