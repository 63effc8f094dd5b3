"""The contention benchmark: its options, its status, and a run. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contend.conditions import LAUNCHES, LAUNCHES_TWO, TOKENS, TOKENS_TWO
from benchmarks.contend.figures import Measured, to_json
from benchmarks.contention import main
from benchmarks.decode_measured import LLAMA
from tests.benchmarks.contend.test_figures import reached


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sides", "nobody"], "--sides matches no side; the sides are tpcompile tp=1, launches"),
        (["--conditions", "rain"], "invalid choice: 'rain'"),
        (["--pairs", "0"], "must be at least 1"),
        (["--from", "/no/such/file"], "must hold results of --json: FileNotFoundError"),
        (["--peer-python", "eager=python"], "must start with one of"),
    ],
)
def test_bad_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measured", "status", "says"),
    [
        (reached(), 0, "44 of 44 limits met, 0 MISSED"),
        (reached(1.02), 1, "12 of 44 limits met, 32 MISSED"),
        (reached(late=2.1), 1, "38 of 44 limits met, 6 MISSED"),
        (reached(gaps={TOKENS: [0.3, 0.2]}), 1, "tokens WRONG; largest gap 0.3000"),
        (reached(missing={LLAMA: "it fell"}), 1, "llama.cpp failed: it fell"),
        (reached(impossible={"quota": "no cgroup"}), 0, "1.5: not possible here: no cgroup"),
    ],
)
def test_a_missed_limit_is_a_failure(
    measured: Measured,
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(to_json(measured)))
    assert main(["--from", str(file)]) == status
    assert says in capsys.readouterr().out
    assert main(["--from", str(file), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["ok"] is (status == 0)


@pytest.mark.usefixtures("forked_sides")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All sides give the model's tokens in each condition; a peer that is missing is named."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    options = ["--model", "tiny-qwen3", "--context", "5", "--steps", "3", "--pairs", "1"]
    options += ["--directory", str(tmp_path), "--sides", "tpcompile", "llama", "--json"]
    options += ["--peer-python", f"llama.cpp={bare / 'bin' / 'python'}"]
    assert main([*options, "--conditions", "nice-0", "one-core-later"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and not report["missing"] and report["targets"] == []
    assert list(report["not_installed"]) == [LLAMA]
    sides = [LAUNCHES, TOKENS, LAUNCHES_TWO, TOKENS_TWO]
    assert [row["side"] for row in report["series"]] == sides * 2
    assert set(report["gaps"]) == set(sides)
    steps = {len(block) for row in report["series"] for pair in row["pairs"] for block in
             pair["alone"] + pair["loaded"]}  # fmt: skip
    assert steps == {3}
    # the checkpoint is kept, and a second process loads within the condition
    written = (tmp_path / "tiny-qwen3-bf16" / "model-00000.safetensors").stat().st_mtime_ns
    options[options.index("tpcompile")] = LAUNCHES
    assert main([*options, "--conditions", "one-core", "two-at-once"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["condition"] for row in report["series"]] == ["one-core", "two-at-once"]
    assert [len(pair["loaded"]) for row in report["series"] for pair in row["pairs"][:1]] == [1, 2]
    after = (tmp_path / "tiny-qwen3-bf16" / "model-00000.safetensors").stat().st_mtime_ns
    assert after == written
