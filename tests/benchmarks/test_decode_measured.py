"""Shares, ratios and targets of the decode benchmark."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.decode_measured import (
    EAGER,
    LLAMA,
    NATIVE,
    ONE,
    OPENVINO,
    TARGETS,
    TWO,
    Agreement,
    Case,
    Measured,
    Turns,
    from_json,
    to_json,
)

CASE = Case("bf16", 1, 64)


def reached(slower: float = 1.0, **changes: Any) -> Measured:
    """All targets reached, just; `slower` is how much longer tpcompile takes."""
    turns: dict[Case, Turns] = {}
    for target in TARGETS:
        seconds = turns.setdefault(target.case, Turns(target.case)).seconds
        seconds[target.peer] = [target.least] * 20
        seconds[target.side] = [slower] * 20
    return Measured(**{"model": "qwen3-0.6b", "turns": list(turns.values()), **changes})


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (reached(), True),
        (reached(1.01), False),
        (reached(1.01, model="tiny-qwen3"), True),
        (reached(missing={TWO: "it fell"}), False),
        (reached(not_installed={LLAMA: "no package"}), True),
        (reached(not_supported={NATIVE: "batch 9"}), True),
        (reached(agreements=[Agreement(ONE, "context 64", 0.5, False)]), False),
    ],
)
def test_what_fails(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_a_target_whose_peer_is_gone_is_not_met() -> None:
    measured = reached()
    for turns in measured.turns:
        turns.seconds.pop(EAGER, None)
    assert not measured.ok
    assert None in [ratio for _, ratio in measured.targets()]


def test_shares_of_the_read_bandwidth() -> None:
    turns = Turns(CASE, 1640, {ONE: [2.0, 2.0, 9.0]}, [1000.0, 1640.0, 2000.0])
    prompt = Turns(Case("bf16", 1, 64, prompt=True), None, {ONE: [1.0]})
    measured = Measured("tiny-qwen3", turns=[turns, prompt])
    assert measured.share(CASE, ONE) == 0.5
    assert measured.share(prompt.case, ONE) is None and measured.share(CASE, TWO) is None


def test_the_best_peer_is_the_fastest_side_that_is_not_ours() -> None:
    seconds = {EAGER: [4.0], LLAMA: [2.0], OPENVINO: [3.0], NATIVE: [1.0]}
    measured = Measured("tiny-qwen3", turns=[Turns(CASE, 1, seconds)])
    assert measured.best_peer(CASE) == LLAMA
    assert measured.ratio(CASE, NATIVE, LLAMA) == 2.0
    assert measured.ratio(CASE, NATIVE, TWO) is None
    assert measured.best_peer(Case("fp32", 1, 64)) is None


def test_groups_are_compared_through_eager() -> None:
    """The second group ran when the machine was half as fast."""
    slow = Turns(CASE, 8, {EAGER: [8.0], OPENVINO: [5.0]}, [2.0])
    measured = Measured("m", turns=[Turns(CASE, 8, {EAGER: [4.0], NATIVE: [2.0]}, [4.0]), slow])
    assert measured.ratio(CASE, NATIVE, OPENVINO) == pytest.approx(5 / 4)
    assert measured.ratio(CASE, OPENVINO, EAGER) == pytest.approx(8 / 5)
    assert measured.share(CASE, OPENVINO) == pytest.approx(4 / 5)
    assert measured.best_peer(CASE) == OPENVINO


def test_json_round_trip() -> None:
    measured = reached(agreements=[Agreement(ONE, "c", 0.5, True)], machine={"cpu": "a"})
    measured.turns[0].bandwidths.append(3.0)
    found = json.loads(json.dumps(to_json(measured)))
    assert asdict(from_json(found)) == asdict(measured)
    assert found["ok"] and all(target["ok"] for target in found["targets"])
    figures = {(f["side"], f["tokens"], f["prompt"]): f for f in found["figures"]}
    assert figures[ONE, 1024, False]["over_eager"] == pytest.approx(1.6)
    assert figures[ONE, 512, True]["milliseconds"] == 1000.0
