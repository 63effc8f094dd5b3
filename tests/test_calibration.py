"""Calibration on tiny models: what is measured, and what comes out. No time is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tpcompile.calibration import Case, calibrate, cases_of, program_of, verify
from tpcompile.vm.program import Role
from tpcompile.vm.targets import TARGETS

pytestmark = pytest.mark.usefixtures("captured_once")
TINY = "preset:tiny-qwen3"


def test_a_calibrated_target_predicts_steps() -> None:
    messages: list[str] = []
    calibration = calibrate(
        TINY, context=40, name="mine", workers=1, repeats=3, say=messages.append
    )
    assert (calibration.target.name, calibration.target.workers) == ("mine", 1)
    assert calibration.target.bytes_per_us > 0 and calibration.target.instruction_us > 0
    assert calibration.fit.error >= 0
    assert len(calibration.trace.measured.steps) == 3
    assert calibration.trace.title == f"{TINY}, batch 1, 40 tokens"
    layers = f"{TINY}, first 2 layers, batch"
    assert [text for text in messages if text.startswith("measuring")] == [
        f"measuring {TINY}, batch 1, 40 tokens",
        f"measuring {layers} 4, 64 tokens",
        f"measuring {layers} 16, 64 tokens",
    ]
    cases = [Case(TINY, 64), Case("preset:tiny-qwen2", 64, 2)]
    checked = list(verify(calibration.target, cases, repeats=2))
    assert [prediction.case for prediction in checked] == cases
    for prediction in checked:
        assert prediction.predicted_us > 0 and prediction.measured_us <= prediction.median_us
        assert prediction.ratio == prediction.predicted_us / prediction.measured_us
        assert prediction.to_json()["context"] == 64


def test_only_the_first_layers() -> None:
    target = replace(TARGETS["cpu"], workers=1)
    whole, first = (program_of(Case(TINY, 64, 1, layers), target) for layers in (None, 1))
    caches = [p.buffers[p.one_per_rank(Role.CACHE)[0]].shape[0] for p in (whole, first)]
    assert caches == [2, 1]


def test_the_cases_to_verify() -> None:
    cases = cases_of("a", "b")
    assert {(case.model, case.context, case.batch) for case in cases} == {
        ("a", 64, 1),
        ("a", 1024, 1),
        ("a", 4096, 1),
        ("a", 1024, 8),
        ("b", 1024, 1),
    }
