"""Tests of the benchmark on GPUs, in the interpreter: its numbers and reports, not its times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_decode
from benchmarks.gpu.checks import Check, check_bits
from benchmarks.gpu.kernels import Megakernel, Shape, TileGraph, bytes_of, levels_of
from benchmarks.gpu.limits import Limits, limits_of
from benchmarks.gpu.peers import Eager
from benchmarks.gpu.report import Report, Row
from tests.backends.reference.stepping import Case
from tests.runtime.eager_pair import lively
from tpcompile.backends.measuring import RandomMemory
from tpcompile.backends.rotation import CPU
from tpcompile.vm.proof.dependencies import dependencies

pytestmark = pytest.mark.usefixtures("captured_once")

SHAPE = Shape("tiny-qwen3", context=4, steps=2)


def test_the_kernels_of_a_graph_compute_what_the_megakernel_computes() -> None:
    shape, random = replace(SHAPE, steps=1), RandomMemory()
    program = shape.program(CPU)
    megakernel, graph = (kind(shape, program, random) for kind in (Megakernel, TileGraph))
    assert megakernel.burst() > 0 and graph.burst() > 0
    assert torch.equal(megakernel.executor.logits, graph.executor.logits)


def test_levels_are_in_the_order_of_dependencies() -> None:
    program = Case("tiny-qwen3", tp=2, lengths=(5, 9), lowering="rows").program
    levels = levels_of(program)
    level_of = {number: place for place, level in enumerate(levels) for number in level}
    assert sorted(level_of) == list(range(len(program.instructions)))
    for number, groups in enumerate(dependencies(program.instructions)):
        assert all(
            level_of[before] < level_of[number] for group in groups for before in group.members
        )


def test_the_bytes_of_a_step() -> None:
    """Weights once, without the rows of an embedding that is not the head, and the context."""
    program = SHAPE.program(CPU)
    cache = next(b for b in program.buffers if b.role.kind == "cache")
    assert cache.storage is not None
    layers, _, _, heads, width = cache.storage
    longer = bytes_of(program, 104) - bytes_of(program, 4)
    assert bytes_of(program, 104, 64) - bytes_of(program, 4, 64) == 64 * longer
    assert longer == 100 * layers * 2 * heads * width * 2
    matrices = sum(
        b.shape[0] * b.shape[1] * 2
        for b in program.buffers
        if b.role.kind == "weight" and len(b.shape) == 2
    )
    assert bytes_of(program, 0) == matrices


def test_a_burst_of_the_peer_starts_at_the_same_context() -> None:
    side = Eager(replace(SHAPE, batch=2), lively("tiny-qwen3"))
    for _ in range(2):
        assert side.burst() > 0
        assert side._cache.get_seq_length() == SHAPE.context - 1


def test_limits() -> None:
    limits = limits_of(CPU)
    assert limits.read > 0 and limits.copy > 0


def test_the_report(tmp_path: Path) -> None:
    report = Report("NVIDIA H200", 32, Limits(4300.0, 4200.0))
    report.checks.append(Check("a: the same bits", True, "100/100"))
    report.rows.append(Row("qwen3-0.6b", 128, 1, "tpcompile", 1_204_000_000, [0.5, 0.6, 0.7]))
    report.rows.append(Row("qwen3-0.6b", 128, 64, "eager", 1, error="OSError: no room"))
    text = report.text()
    assert "0.600" in text and "47%" in text and "0.48" in text
    assert "qwen3-0.6b, 128, batch 64: eager: OSError: no room" in text
    assert report.ok
    report.checks.append(Check("a: error", False, "2e-3, Hugging Face 1e-3"))
    assert not report.ok and "NO" in report.text()
    first, second = report.record(tmp_path), report.record(tmp_path)
    assert first != second
    record = json.loads(first.read_text(encoding="utf-8"))
    assert first.name == f"{report.when[:10]}-nvidia-h200.json"
    assert record["rows"][0]["share"] == pytest.approx(0.4667, abs=1e-4)
    assert record["versions"]["torch"] == torch.__version__ and record["gb_per_s"]["read"] == 4300


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_decode.main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each run had other bits, the checks would say so."""
    from benchmarks.gpu import checks

    monkeypatch.setattr(checks, "POLICIES", ["zigzag"])
    monkeypatch.setattr(Megakernel, "burst", lambda side: 0.0)
    monkeypatch.setattr(checks, "_logits", lambda side, shape: torch.rand(1, 4))
    assert not any(check.ok for check in check_bits(replace(SHAPE, steps=1), RandomMemory(), 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's, of its Inductor
def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--device cpu --models tiny-qwen3 --contexts 8 --batches 1 3 --steps 2 --bursts 2"
    record = ["--repeats", "2", "--compiled", "8", "--record", str(tmp_path)]
    assert gpu_decode.main([*line.split(), *record, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(check["ok"] for check in report["checks"])
    assert [row["error"] for row in report["rows"]] == [""] * 7
    assert len(list(tmp_path.iterdir())) == 1
