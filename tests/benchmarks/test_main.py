"""Tests of `python -m benchmarks`: names, help, and exit status."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import BENCHMARKS, main


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_lists_every_benchmark(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for name, (_, says) in BENCHMARKS.items():
        assert name in shown and says in shown


def test_an_unknown_name_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutant"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "'mutant'" in shown.err and "mean mutants?" in shown.err
