"""The decode benchmark runs all sides in turn on the same tokens, and reports each failure."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.checkpoint import RandomCheckpoint, write_checkpoint
from benchmarks.decode import Benchmark, main
from benchmarks.decode_measured import EAGER, NATIVE, ONE, TARGETS, TWO, Agreement, Measured
from benchmarks.decode_report import show
from benchmarks.peers.kinds import eager
from benchmarks.peers.side import Side, SideError, SideSpec
from benchmarks.peers.worker import Runner

pytestmark = pytest.mark.usefixtures("forked_sides")
CHECKPOINT = RandomCheckpoint(Path("nowhere"), 2, 1013, torch.float32, 1, (1, 1))


def _measured(slower: float = 1.0, **changes: Any) -> Measured:
    """Return times that just reach all targets, with tpcompile's multiplied by `slower`."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for target in TARGETS:
        seconds.setdefault(target.peer, {})[target.what] = [target.least] * 20
        seconds.setdefault(target.side, {})[target.what] = [slower] * 20
    return Measured(**{"model": "qwen3-0.6b", "seconds": seconds, **changes})


@pytest.mark.parametrize(
    ("measured", "ok", "says"),
    [
        (_measured(), True, "64, tpcompile tp=2 over Hugging Face TP, 2 ranks: 2.00 ×"),
        (_measured(1.01), False, "MISSED"),
        (_measured(1.01, model="tiny-qwen3"), True, "tiny-qwen3, batch 1"),
        (_measured(missing={TWO: "it fell"}), False, f"{TWO} is missing: it fell"),
        (
            _measured(agreements=[Agreement(ONE, "context 64", 0.5, False)]),
            False,
            "DISAGREE with eager",
        ),
        (_measured(agreements=[Agreement(ONE, "context 64", 0.0, True)]), True, "agree with eager"),
    ],
)
def test_what_fails(measured: Measured, ok: bool, says: str) -> None:
    text = io.StringIO()
    show(measured, Console(file=text, width=110))
    assert measured.ok is ok
    assert says in text.getvalue()


def test_a_target_whose_peer_is_gone_is_not_met() -> None:
    measured = _measured()
    del measured.seconds[EAGER]
    assert not measured.ok
    assert None in [ratio for _, ratio in measured.targets()]


class _Fake:
    """Fake side that logs its calls and returns given logits."""

    def __init__(self, name: str, log: list[tuple[str, str, int]], logits: Sequence[float]) -> None:
        self._name, self._log, self._logits = name, log, logits
        self.tokens: list[int] = []

    def ask(self, request: str, tokens: Sequence[int]) -> tuple[list[float], Any]:
        self._log.append((self._name, request, len(tokens)))
        self.tokens += tokens
        count = 1 if request == "prefill" else len(tokens)
        return [99.0] + [1.0] * (count - 1), np.array(self._logits, dtype=np.float32)


def _benchmark(**logits: Sequence[float]) -> tuple[Benchmark, dict[str, _Fake], list[Any]]:
    log: list[Any] = []
    names = {"eager": EAGER, "one": ONE, "two": TWO}
    fakes = {names[name]: _Fake(names[name], log, own) for name, own in logits.items()}
    benchmark = Benchmark(CHECKPOINT, "qwen3-0.6b")
    benchmark._sides.update(fakes)  # type: ignore[arg-type]
    return benchmark, fakes, log


def test_sides_take_turns_on_the_same_tokens() -> None:
    benchmark, fakes, log = _benchmark(eager=[1, 2], one=[1, 2])
    benchmark.decode(64, 10, Console(quiet=True))
    assert log == [(n, r, c) for r, c in [("prefill", 64), ("decode", 6), ("decode", 6)]
                   for n in (EAGER, ONE)]  # fmt: skip
    assert fakes[EAGER].tokens == fakes[ONE].tokens and len(set(fakes[ONE].tokens)) > 50
    # the first step of each turn, which took 99 s, is excluded
    assert benchmark.measured.seconds == {n: {"64": [1.0] * 10} for n in (EAGER, ONE)}


def test_prefill_does_not_count_the_first() -> None:
    benchmark, _, log = _benchmark(eager=[1, 2], one=[1, 2], two=[1, 2])
    benchmark.prefill(512, 3, Console(quiet=True))
    assert [name for name, _, _ in log] == [EAGER, ONE] * 4
    assert len(benchmark.measured.seconds[ONE]["prefill"]) == 3


@pytest.mark.parametrize(
    ("logits", "ok"), [([1.0, 2.0], True), ([1.0, 2.1], False), ([1.0, float("nan")], False)]
)
def test_sides_must_agree(logits: list[float], ok: bool) -> None:
    benchmark, _, _ = _benchmark(eager=[1, 2], two=logits)
    benchmark.decode(8, 5, Console(quiet=True))
    assert [(a.side, a.ok) for a in benchmark.measured.agreements] == [(TWO, ok)] * 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny-qwen3")


def test_a_runner_continues_its_sequence(tiny: RandomCheckpoint) -> None:
    loaded = eager(tiny.directory, 1)
    runner = Runner(loaded)
    _, first = runner.prefill([5, 6, 7])
    seconds, last = runner.decode([8, 9])
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0]
    assert len(seconds) == 2 and min(seconds) > 0
    torch.testing.assert_close(torch.from_numpy(first), expected[2])
    torch.testing.assert_close(torch.from_numpy(last), expected[-1])
    runner.prefill([1])
    again = runner.prefill([5, 6, 7])[1]  # a new sequence resets the state
    torch.testing.assert_close(torch.from_numpy(again), expected[2])


@pytest.mark.parametrize(
    ("kind", "directory", "why"),
    [("unknown", "", "KeyError: 'unknown'"), ("eager", "nothing-here", "nothing-here")],
)
def test_a_side_that_cannot_start_is_missing(
    tmp_path: Path, kind: str, directory: str, why: str
) -> None:
    checkpoint = RandomCheckpoint(tmp_path / directory, 2, 10, torch.float32, 1, (1, 1))
    benchmark = Benchmark(checkpoint, "qwen3-0.6b")
    with ExitStack() as stack:
        benchmark.start([SideSpec("side", kind, 1, 1)], stack, Console(quiet=True))
    assert why in benchmark.measured.missing["side"]
    assert not benchmark.measured.ok


def test_a_side_that_dies_is_an_error(tiny: RandomCheckpoint) -> None:
    with Side(SideSpec("side", "eager", 1, 1), tiny.directory) as side:
        assert side.ready() == [side.pid]
        side._process.kill()
        with pytest.raises(SideError, match=r"side ended"):
            side.ask("prefill", [1])


def test_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "tiny-qwen3", "--contexts", "9", "--steps", "5", "--prefills", "0"]
    assert main([*options, "--sides", "eager", "tp=1", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not found["missing"] and found["targets"] == []
    steps = {name: len(own["9"]) for name, own in found["seconds"].items()}
    assert steps == {EAGER: 5, ONE: 5, NATIVE: 5}
    assert len(found["agreements"]) == 4
    assert found["bandwidths"] and all(own["9"] > 0 for own in found["shares"].values())


@pytest.mark.parametrize("options", [["--sides", "nobody"], ["--steps", "0"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert "nobody" not in capsys.readouterr().out


def test_shares_of_the_read_bandwidth() -> None:
    checkpoint = replace(CHECKPOINT, weight_bytes=1000, token_bytes=10)
    assert checkpoint.step_bytes(64) == 1640
    measured = Measured(
        "tiny-qwen3",
        {ONE: {"64": [2.0, 2.0, 9.0], "prefill": [1.0]}},
        bandwidths=[1000.0, 1640.0, 2000.0],
        step_bytes={"64": checkpoint.step_bytes(64)},
    )
    assert measured.share(ONE, "64") == 0.5
    assert measured.share(ONE, "prefill") is None and measured.share(TWO, "64") is None
    text = io.StringIO()
    show(measured, Console(file=text, width=110))
    assert "0.50 of read" in text.getvalue() and "only reads: 0.0 GB/s" in text.getvalue()
