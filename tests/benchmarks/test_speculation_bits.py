"""Guessed tokens beside plain decoding: every token is counted, and a difference is seen."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from benchmarks import speculation_bits
from benchmarks.speculation_bits import main
from tpcompile.serving.sampling import Chosen

OPTIONS = ["--kinds", "dense", "--forms", "bf16", "--tp", "1", "--tokens", "300", "--json"]


def test_no_bit_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation_bits, "_REQUESTS", 8)
    assert main(OPTIONS) == 0
    results = json.loads(capsys.readouterr().out)
    names = [row["guesses"] for row in results]
    assert {"prompt:8", "a model", "right 1 of 2", "with aborts", "with preemption"} < set(names)
    assert sum(row["tokens"] for row in results) >= 300
    assert all(0 < row["logprobs"] <= row["tokens"] for row in results)
    assert sum(row["differ"] for row in results) == 0
    assert results[-1]["recomputed"] > 0 == sum(row["recomputed"] for row in results[:-1])
    assert sum(row["accepted"] for row in results) > 50


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        (([Chosen(1, -0.5), Chosen(2)], "stop"), [2, 1, 0]),
        (([Chosen(1, -0.25), Chosen(2)], "stop"), [2, 1, 1]),
        (([Chosen(1, -0.5), Chosen(3)], "stop"), [2, 1, 1]),
        (([Chosen(1, -0.5)], "stop"), [2, 1, 1]),
        (([Chosen(1, -0.5), Chosen(2)], "length"), [2, 1, 1]),
    ],
    ids=["the same", "a log-probability", "a token", "a shorter text", "another end"],
)
@pytest.mark.parametrize("preempted", [(), (4,)])
def test_every_difference_counts(
    changed: Any, counts: list[int], preempted: Collection[int]
) -> None:
    plain: Any = {4: [([Chosen(1, -0.5), Chosen(2)], "stop")]}
    expected = [0, 0, 0, counts[0], counts[2]] if preempted else [*counts, 0, 0]
    assert speculation_bits._compared(plain, {4: [changed]}, preempted) == expected


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = speculation_bits.Result("dense", "bf16", 1, "prompt:8", 10, 10, 1)
    monkeypatch.setattr(speculation_bits, "compared", lambda *_: [wrong])
    assert main(["--kinds", "dense", "--forms", "bf16"]) == 1
