"""The benchmark of mixtures of experts measures every case."""

from __future__ import annotations

import json

import pytest

from benchmarks.experts import main

pytestmark = pytest.mark.usefixtures("captured_once")

TINY = ["tiny-qwen3-moe", "--layers", "0", "--vocabulary", "0", "--steps", "3", "--turns", "1"]


def test_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--weights", "bf16", "int8", "--batches", "1", "2", "--prompt", "9", "--json"]
    assert main([*TINY, *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["weights"], row["batch"]) for row in rows] == [
        ("bf16", 1), ("bf16", 2), ("int8", 1), ("int8", 2)
    ]  # fmt: skip
    plain, batched, few, _ = rows
    assert plain["step_mb"] < batched["step_mb"] and few["step_mb"] < plain["step_mb"]
    assert set(plain["prompt_ms"]) == {"tpcompile", "eager", "grouped_mm"}
    assert set(few["prompt_ms"]) == {"tpcompile"}
    assert all(row["read_gb_s"] > 0 and row["peak_gb"] > 0 and row["load_s"] > 0 for row in rows)


def test_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--weights", "int8", "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "of read" in shown and "int8" in shown
