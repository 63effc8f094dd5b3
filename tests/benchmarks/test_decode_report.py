"""The table of the decode benchmark names every side, in its width."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from benchmarks.decode_measured import (
    EAGER,
    HUGGING_FACE_TP,
    LLAMA,
    NATIVE,
    ONE,
    OPENVINO,
    TWO,
    Agreement,
    Case,
    Loaded,
    Measured,
    Turns,
    Weights,
)
from benchmarks.decode_report import WIDTH, show
from benchmarks.peers.kinds import Sizes
from tests.benchmarks.test_decode_measured import reached


def _shown(measured: Measured) -> str:
    text = io.StringIO()
    show(measured, Console(file=text, width=WIDTH))
    return text.getvalue()


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (reached(), "64, tpcompile tp=2 over Hugging Face TP, 2 ranks: 2.00 ×"),
        (reached(1.01), "MISSED"),
        (reached(model="tiny-qwen3", machine={"threads": 3}), "tiny-qwen3, threads 3"),
        (reached(missing={"bf16": {TWO: "it fell"}}), f"{TWO} failed with bf16: it fell"),
        (reached(not_installed={LLAMA: "run pip"}), f"{LLAMA} is not installed: run pip"),
        (reached(agreements=[Agreement(ONE, "64", 0.5, False)]), "DISAGREE with eager"),
        (reached(agreements=[Agreement(ONE, "64", 0.0, True)]), "agree with eager"),
    ],
)
def test_says(measured: Measured, says: str) -> None:
    assert says in " ".join(_shown(measured).split())


def test_rows() -> None:
    seconds = {EAGER: [0.2], OPENVINO: [0.1, 0.1, 0.3], NATIVE: [0.0625]}
    few, products = f"{NATIVE} int4:64", {NATIVE: [0.0025]}
    seconds[few] = [0.05]
    case = Case("bf16", 16, 4096)
    turns = Turns(case, seconds, {side: [[2e10, 2e10]] for side in seconds}, products)
    plain, ints = Sizes(10**9, 10**9, 10), Sizes(3 * 10**8, 281_250_000, 10)
    loaded = {"bf16": dict.fromkeys(seconds, Loaded("", plain)) | {few: Loaded("int4:64", ints)}}
    reasons: dict[str, Any] = {"missing": {"bf16": {TWO: "a"}}, "not_installed": {LLAMA: "b"}}
    reasons |= {
        "not_supported": {HUGGING_FACE_TP: "c"},
        "weights": {"bf16": Weights(5 * 10**8, 10**9)},
    }
    measured = Measured("m", turns=[turns], loaded=loaded, **reasons)
    lines = _shown(measured).splitlines()
    rows = {cells[0]: cells[1:] for line in lines for cells in [re.split(r"\s{2,}", line.strip())]}
    assert rows["bf16, batch 16, context 4,096"] == []
    ours = ["62.5", "62.5 to 62.5", "256.0", "1,001", "16.00", "0.80", "0.80", "3.20", "1.60"]
    assert rows[NATIVE] == ours
    peer = ["100.0", "100.0 to 300.0", "160.0", "1,001", "16.00", "0.50", "2.00", "1.00"]
    assert rows[OPENVINO] == peer
    assert rows[few] == ["50.0", "50.0 to 50.0", "320.0", "282", "4.50", "0.28", "4.00"]
    assert rows[TWO] == ["failed"] and rows[LLAMA] == ["not installed"]
    assert rows[HUGGING_FACE_TP] == ["unsupported"]
