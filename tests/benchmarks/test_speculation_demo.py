"""The benchmark of the demo model and its draft measures every side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speculation_demo import main
from tpcompile.demo import make_demo


def test_measures_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_demo(tmp_path / "demo", steps=1)
    options = ["--sequences", "2", "--new", "64", "--turns", "1", "--json"]
    assert main([str(tmp_path / "demo"), *options]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [row["guesses"] for row in results] == ["none", "prompt:8", "draft"]
    assert results[0]["accepted"] is None and results[0]["ratio"] == 1
    assert all(row["tokens_per_s"] > 0 for row in results)


def test_too_few_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--new", "32"])
    assert "--new must be greater than 32, got 32" in capsys.readouterr().err
