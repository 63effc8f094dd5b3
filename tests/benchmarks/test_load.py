"""The load benchmark measures memory of all processes, and fails above the limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint import RandomCheckpoint, random_checkpoint
from benchmarks.load import Case, Run, limit, main, run_once
from benchmarks.memory import MemoryWatch, family, own_bytes
from benchmarks.peers.side import Side, SideError, SideSpec

pytestmark = pytest.mark.usefixtures("captured_once")

MB = 1000**2


@pytest.mark.parametrize(
    ("peaks", "most", "missing", "ok"),
    [
        ((90, 100), 100, "", True),
        ((90, 101), 100, "", False),
        ((101, 90), None, "", True),
        ((90, 90), 100, "it fell", False),
    ],
)
def test_too_much_is_a_failure(
    peaks: tuple[int, int], most: int | None, missing: str, ok: bool
) -> None:
    runs = [Run(1.0, (1, 1), 0), Run(1.0, peaks, 0)]
    assert Case("model", "side", 2, 100, most, runs, missing).ok is ok


def test_limit() -> None:
    checkpoint = RandomCheckpoint(Path(), 1, 1, torch.bfloat16, 1000 * MB, (1001, 2 * MB // 10))
    assert limit(checkpoint, 2) == 525 * MB + 501 * MB // 5 + 200 * MB


def test_few_bits_are_measured_above_an_idle_rank() -> None:
    runs = [Run(1.0, (150, 160), 0)]
    assert Case("model", "side", 2, 100, 100, runs, idle=60).ok
    assert not Case("model", "side", 2, 100, 100, runs, idle=59).ok


_PROGRAM = """
import mmap, subprocess, sys
held = bytearray(30_000_000)                        # anonymous
shared = mmap.mmap(-1, 20_000_000)                  # anonymous and shared
shared.write(b"1" * 20_000_000)
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
sum(mapped[::4096])                                 # of a file: read, and not counted
print("ready", flush=True)
sys.stdin.read()
"""


def test_counts_what_a_process_cannot_drop(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1" * 64 * MB)
    # as a grandchild, like ranks under a launcher
    shell = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", _PROGRAM, str(path)]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with MemoryWatch(process.pid) as watch:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            (child,) = [pid for pid in family(process.pid) if pid != process.pid]
            assert 50 * MB <= own_bytes(child) <= 64 * MB
            while not watch.peaks.get(child, 0) >= 50 * MB:
                assert process.poll() is None
        process.communicate()
    assert own_bytes(child) == 0
    assert family(process.pid) == [process.pid]


def test_a_run_names_the_peak_of_its_ranks() -> None:
    with random_checkpoint("tiny-qwen3") as checkpoint:
        run = run_once(SideSpec("side", "eager", 1, 1), checkpoint)
    assert len(run.peaks) == 1 and run.peaks[0] > 50 * MB
    assert run.others == 0 and run.seconds > 0
    assert not checkpoint.directory.exists()


def test_main_fails_when_a_side_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    most = 300 * MB

    def run(spec: SideSpec, checkpoint: RandomCheckpoint) -> Run:
        return Run(1.0, (most,) * spec.tp, os.getpid())

    monkeypatch.setattr("benchmarks.load.run_once", run)
    arguments = ["--models", "tiny-qwen3", "--ranks", "2", "--runs", "2"]
    assert main([*arguments, "--json"]) == 1
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [case["ok"] for case in cases] == [True, False, False]  # peers have no limit
    assert main(arguments) == 1
    assert "MISSED" in capsys.readouterr().out
    most = 100 * MB
    assert main(arguments) == 0
    assert "met" in capsys.readouterr().out


def test_few_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    starts: list[tuple[str, RandomCheckpoint]] = []

    def run(spec: SideSpec, checkpoint: RandomCheckpoint) -> Run:
        starts.append((spec.weights, checkpoint))
        return Run(1.0, (500 * MB if len(starts) == 2 else 100 * MB,), os.getpid())

    monkeypatch.setattr("benchmarks.load.run_once", run)
    arguments = ["--models", "tiny-qwen3", "--ranks", "1", "--runs", "1", "--json"]
    arguments += ["--few-bits-only", "--weights", "int4:32", "--head", "int4"]
    assert main(arguments) == 1  # the second start uses too much above the first, an idle rank
    report = json.loads(capsys.readouterr().out)
    assert [(case["side"], case["ok"]) for case in report["cases"]] == [
        ("tpcompile native tp=1, made int4:32", False),
        ("tpcompile native tp=1, read int4:32", True),
    ]
    # the idle rank, weights that are made while they are loaded, and those of a checkpoint
    assert [weights for weights, _ in starts] == ["", "int4:32", ""]
    _, wide, narrow = (checkpoint.weight_bytes for _, checkpoint in starts)
    assert narrow == report["cases"][0]["weight_bytes"] < wide
    assert report["cases"][0]["limit"] == int(narrow * 1.05) + 250 * MB
    quantized, read = report["rates"]
    assert quantized["bytes"] > wide > read["bytes"] > narrow
    assert all(
        len(rate["loading"]) == 1 and rate["share_of_read"] > 0 for rate in (quantized, read)
    )


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--weights", "int5"])
    assert "weights must be" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [[], [1]])
def test_ranks_that_were_not_seen_are_an_error(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unseen(Side):
        def ready(self) -> list[int]:
            return ranks  # before the side has loaded anything

        def ask(self, request: str, *arguments: Any) -> tuple[list[float], Any]:
            return [], None

    monkeypatch.setattr("benchmarks.load.Side", Unseen)
    with random_checkpoint("tiny-qwen3") as checkpoint, pytest.raises(SideError, match="sampled"):
        run_once(SideSpec("side", "eager", 1, 1), checkpoint)
