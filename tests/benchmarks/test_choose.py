"""The benchmark of choosing a token: it measures every case, and a slow one is a failure."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from benchmarks.choose import SETTINGS, Measured, main, show


@pytest.mark.parametrize(("ms", "ok"), [([0.5, 1.0, 9.0], True), ([0.5, 1.01, 1.1], False)])
def test_a_missed_target_is_a_failure(ms: list[float], ok: bool) -> None:
    case, fast = ("top_p 0.8", "flat", 8), ("top_p 0.8", "flat", 1)
    measured = Measured(2, 1000, {fast: [0.1], case: ms})
    assert measured.ok is ok
    shown = io.StringIO()
    show(measured, Console(file=shown, width=110))
    assert ("met" if ok else "MISSED") in shown.getvalue()


def test_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    options = ["--json", "--turns", "2", "--vocabulary", "3000", "--threads", "1"]
    status = main([*options, "--batches", "1", "2"])
    report = json.loads(capsys.readouterr().out)
    assert status == (not report["ok"])
    assert (report["threads"], report["vocabulary"]) == (1, 3000)
    assert torch.get_num_threads() == threads
    cases = [(case["setting"], case["logits"], case["batch"]) for case in report["ms_per_row"]]
    assert len(set(cases)) == len(cases) == len(SETTINGS) * 2 * 2
    assert all(0 < case["min"] <= case["median"] for case in report["ms_per_row"])


def test_no_row_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--batches", "0"])
    assert ended.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err
