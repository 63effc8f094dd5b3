"""`tpcompile calibrate`: the file that it writes is a target, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tpcompile.vm.targets import target_of

LINE = "calibrate --model preset:tiny-qwen3 --context 40 --repeats 2 --threads 1"


def test_the_file_is_a_target(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    ran = cli(LINE, "--json", "-o", str(path))
    assert ran.status == 0, ran.err
    assert ran.err.endswith(f"fitting\nwrote {path}\n")
    report = json.loads(ran.out)
    assert list(report) == ["target", "error", "step", "predictions"]
    assert report["target"] == json.loads(path.read_text())
    assert target_of(str(path)).name == "mine"
    assert (report["step"]["steps"], report["predictions"]) == (2, [])
    used = cli("schedule preset:tiny-qwen3 --json --target", str(path))
    assert (used.status, json.loads(used.out)["workers"]) == (0, 1)


def test_tables_and_predictions(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"{LINE} --verify --other preset:tiny-qwen2 -o", str(tmp_path / "mine.json"))
    assert ran.status == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    for text in (
        "bytes_per_us",
        "error of the fit",
        "partial_attention",
        "ms per step",
        "tiny-qwen2",
    ):
        assert text in ran.out


def test_weights_of_few_bits(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"{LINE} --weights int4:32 -o", str(tmp_path / "mine.json"))
    assert ran.status == 0, ran.err
    assert "measuring preset:tiny-qwen3, int4:32" in ran.err
    assert target_of(str(tmp_path / "mine.json")).bytes_per_us > 0


REFUSED = {
    "": "-o/--output",
    "-o mine.txt": "The target file must end in .json. Found mine.txt",
    "-o none/mine.json": "There is no directory none",
    "-o mine.json --model preset:tiny": "There is no preset 'tiny'",
    "-o mine.json --other preset:tiny": "There is no preset 'tiny'",
    "-o mine.json --threads 2 --workers 3": "Found --workers 3 and --threads 2",
    "-o mine.json --repeats 0": "the number of repeats must be an integer of at least 1",
}


@pytest.mark.parametrize("options", REFUSED)
def test_bad_input(cli: Cli, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli(f"calibrate {options}")
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert REFUSED[options] in ran.err
    assert list(tmp_path.iterdir()) == []
