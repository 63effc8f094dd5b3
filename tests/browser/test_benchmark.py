"""The benchmark of the page uses it as a reader does, and its totals of the timeline are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.explorer_page import use_in
from tests.browser.subject import Truth


def test_the_use_of_a_page(browser: Any, report: Path, truth: Truth) -> None:
    used = use_in(browser, report, 10)
    assert list(used.choices) == [stage.name for stage in truth.stages]
    times = (used.view_seconds, used.schedule_seconds, *used.choices.values())
    assert min(times) > 0
    assert (len(used.frames), len(used.draws)) == (10, 10)
    assert used.totals_equal
