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
    Loaded,
    Measured,
    Turns,
    Weights,
    from_json,
    to_json,
)
from benchmarks.peers.kinds import Sizes

CASE = Case("bf16", 1, 64)


def reached(slower: float = 1.0, **changes: Any) -> Measured:
    """Return measurements that just reach all targets; tpcompile takes `slower` times as long."""
    turns: dict[Case, Turns] = {}
    for target in TARGETS:
        seconds = turns.setdefault(target.case, Turns(target.case)).seconds
        seconds[target.peer] = [target.least] * 20
        seconds[target.side] = [slower] * 20
    return Measured(**{"model": "qwen3-0.6b", "turns": list(turns.values()), **changes})


@pytest.mark.parametrize(("seconds", "share"), [(1.5, 0.75), (0.5, 0.5)])
def test_the_limit_is_the_longer_time(seconds: float, share: float) -> None:
    turns = Turns(CASE, {NATIVE: [2.0]}, {NATIVE: [[1640.0] * 2]}, {NATIVE: [seconds]})
    loaded = {"bf16": {NATIVE: Loaded("", Sizes(1000, 1000, 10))}}
    measured = Measured("tiny-qwen3", loaded=loaded, turns=[turns])
    assert measured.share_of_limit(CASE, NATIVE) == share
    assert measured.share_of_limit(CASE, ONE) is None


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (reached(), True),
        (reached(1.01), False),
        (reached(1.01, model="tiny-qwen3"), True),
        (reached(missing={"bf16": {TWO: "it fell"}}), False),
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
    """Turns of two steps: memory was slow in the first, and the last was disturbed."""
    around = [[800.0, 840.0], [1640.0, 1640.0], [1640.0, 1640.0]]
    turns = Turns(CASE, {ONE: [4.0, 4.0, 2.0, 2.0, 9.0, 9.0]}, {ONE: around})
    prompt = Turns(Case("bf16", 1, 64, prompt=True), {ONE: [1.0]})
    loaded = {"bf16": {ONE: Loaded("int4", Sizes(5000, 1000, 10))}}
    measured = Measured(
        "tiny-qwen3", weights={"bf16": Weights(1600, 3200)}, loaded=loaded, turns=[turns, prompt]
    )
    assert measured.share(CASE, ONE) == 0.5
    assert measured.bits(CASE, ONE) == 5.0
    assert measured.share(prompt.case, ONE) is None and measured.share(CASE, TWO) is None


def test_the_best_peer_is_the_fastest_side_that_is_not_ours() -> None:
    seconds = {EAGER: [4.0], LLAMA: [2.0], OPENVINO: [3.0], NATIVE: [1.0]}
    seconds |= {f"{LLAMA} Q8_0": [1.0], f"{OPENVINO} int8": [1.5], f"{NATIVE} int8:row": [0.5]}
    formats = {
        f"{LLAMA} Q8_0": "int8",
        f"{OPENVINO} int8": "int8",
        f"{NATIVE} int8:row": "int8:row",
    }
    loaded = {"bf16": {name: Loaded(weights) for name, weights in formats.items()}}
    measured = Measured("tiny-qwen3", loaded=loaded, turns=[Turns(CASE, seconds)])
    assert measured.best_peer(CASE, NATIVE) == LLAMA
    assert measured.best_peer(CASE, f"{NATIVE} int8:row") == f"{LLAMA} Q8_0"
    assert measured.ratio(CASE, NATIVE, LLAMA) == 2.0
    assert measured.ratio(CASE, NATIVE, TWO) is None
    assert measured.best_peer(Case("fp32", 1, 64), NATIVE) is None


def test_groups_are_compared_through_eager() -> None:
    """The second group ran when the machine was half as fast."""
    slow = Turns(CASE, {EAGER: [8.0], OPENVINO: [5.0]}, {OPENVINO: [[2.0, 2.0]]})
    fast = Turns(CASE, {EAGER: [4.0], NATIVE: [2.0]}, {NATIVE: [[4.0, 4.0]]})
    loaded = {"bf16": {OPENVINO: Loaded("", Sizes(8, 8, 0))}}
    measured = Measured("m", loaded=loaded, turns=[fast, slow])
    assert measured.ratio(CASE, NATIVE, OPENVINO) == pytest.approx(5 / 4)
    assert measured.ratio(CASE, OPENVINO, EAGER) == pytest.approx(8 / 5)
    assert measured.share(CASE, OPENVINO) == pytest.approx(4 / 5)
    assert measured.best_peer(CASE, NATIVE) == OPENVINO


def test_json_round_trip() -> None:
    measured = reached(agreements=[Agreement(ONE, "c", 0.5, True)], machine={"cpu": "a"})
    measured.turns[0].bandwidths[ONE] = [[3.0, 2.0]]
    measured.loaded["bf16"] = {ONE: Loaded("int8", Sizes(3, 2, 1)), TWO: Loaded()}
    report = json.loads(json.dumps(to_json(measured)))
    assert asdict(from_json(report)) == asdict(measured)
    assert report["ok"] and all(target["ok"] for target in report["targets"])
    figures = {(f["side"], f["tokens"], f["prompt"]): f for f in report["figures"]}
    assert figures[ONE, 1024, False]["over_eager"] == pytest.approx(1.6)
    assert figures[ONE, 512, True]["milliseconds"] == 1000.0
