"""The compile-time benchmark reports missed targets and excludes import time."""

from __future__ import annotations

import builtins
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compile_time import MOST_BYTES, ImportClock, Measured, Run, run_cold

_RUN = Run(1.0, 0.1, 0.1, 0.1, 1.3, 0.1, 2.0, 3.6, 400_000_000)


def _measured(small: Run = _RUN, large: Run = _RUN, help_seconds: float = 0.1) -> Measured:
    return Measured({"small": [small] * 3, "large": [large] * 3}, [help_seconds] * 3)


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (_measured(), True),
        (_measured(large=replace(_RUN, compile=1.9)), True),
        (_measured(large=replace(_RUN, compile=2.0)), False),
        (_measured(replace(_RUN, compile=5.1), replace(_RUN, compile=5.1)), False),
        (_measured(large=replace(_RUN, peak_bytes=MOST_BYTES + 1)), False),
        (_measured(help_seconds=0.6), False),
        (_measured(replace(_RUN, proof=0.3)), True),
        (_measured(replace(_RUN, proof=0.35)), False),
    ],
)
def test_a_missed_target_is_missed(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_imports_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = builtins.__import__

    def work() -> str:
        import slow_to_import  # type: ignore[import-not-found]

        time.sleep(0.05)
        return str(slow_to_import.__name__)

    clock = ImportClock()
    with clock.running():
        name, seconds = clock.timed(work)
    assert name == "slow_to_import"
    assert 0.05 <= seconds < 0.2 <= clock.seconds
    assert builtins.__import__ is plain


def test_a_run_adds_up() -> None:
    run = run_cold("tiny-qwen3", 2)
    assert run.compile == pytest.approx(run.capture + run.passes + run.check + run.proof)
    assert 0 < run.emit < run.wall and run.peak_bytes > 1e8
