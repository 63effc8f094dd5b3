"""The proofs benchmark runs every pipeline, and says which are refused and which are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import fx

from benchmarks import proofs
from benchmarks.proofs import PIPELINES, Result, main
from benchmarks.random_pipelines import (
    INVALID,
    OTHER_NUMBERS,
    PROVED,
    RandomPipeline,
    outcome_of,
)
from tests.captures import captured_once
from tpcompile.ir.ops import SWIGLU
from tpcompile.passes import raise_swiglu
from tpcompile.rewriting.proving import Prover
from tpcompile.rewriting.rewrite import insert


@pytest.fixture(autouse=True)
def _few_ranks_and_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "TPS", range(2, 4))
    monkeypatch.setattr(proofs, "capture", captured_once)


def _by_pipeline(results: list[Result]) -> dict[str, tuple[bool, ...]]:
    return {
        pipeline: tuple(r.proved for r in results if r.case.pipeline == pipeline)
        for pipeline in PIPELINES
    }


def test_every_pipeline_of_a_dense_model_is_proved() -> None:
    results = list(proofs.results(["tiny-qwen3"]))
    assert _by_pipeline(results) == dict.fromkeys(PIPELINES, (True, True))


def test_a_refusal_by_another_rule_is_named() -> None:
    results = list(proofs.results(["tiny-qwen3.5"]))
    refused = [result for result in results if not result.proved]
    assert {result.case.pipeline for result in refused} == {"interleaved"}
    assert all("no attention to rotated heads" in result.refused for result in refused)
    assert not any(result.wrong for result in results)


def _swapped(node: fx.Node, operands: Any) -> fx.Node:
    return insert(node, SWIGLU, operands["up"], operands["gate"])


def test_a_pass_that_changes_values_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(raise_swiglu, "_replacement", _swapped)
    assert main(["tiny-qwen3", "--random", "3", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert all("changes what the graph computes" in preset["wrong"] for preset in report["presets"])


def test_a_wrong_pipeline_is_a_mistake_by_its_proof_and_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = RandomPipeline("tiny-qwen3", 2, "standard")
    assert outcome_of(pipeline).kind == PROVED
    monkeypatch.setattr(raise_swiglu, "_replacement", _swapped)
    assert outcome_of(pipeline).kind == INVALID
    monkeypatch.setattr(Prover, "after", lambda *_: (None, ""))
    assert outcome_of(pipeline).kind == OTHER_NUMBERS
