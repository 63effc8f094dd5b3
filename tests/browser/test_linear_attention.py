"""The page of a model with linear attention: its heads, and the states of a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.reader import watch
from tpcompile.exploring import explore


def test_heads_and_states(browser: Any, session_captures: None, tmp_path: Path) -> None:
    """With two ranks, three key heads of two value heads each: the second key head is on both."""
    explored = explore("preset:tiny-qwen3.5", 2, target="cpu", workers=2)
    explored.write(tmp_path / "report.html")
    reader = watch(browser.new_page())
    reader.open((tmp_path / "report.html").as_uri())
    reader.go(view="ranks", c=0)
    heads, *ranks = reader.rows("table.shares")
    assert heads[-1] == "states per sequence"
    states = explored.compilations[0]["plan"]["ranks"][0]["state_bytes_per_sequence"]
    assert [row[-1] for row in ranks] == [f"{states / 1e3:.2f} KB"] * 2
    assert reader.texts("section.axis ul.repeats li") == [
        "Rank 0 holds key head 1, which rank 1 also holds: its value head 2 reads it.",
        "Rank 1 holds key head 1, which rank 0 also holds: its value head 3 reads it.",
    ]
    assert "2 value heads read each key head" in reader.text("#view")
    reader.go(view="pipeline", c=0, **{"pass": "keep-states"})
    assert any("tpc.resumed_delta_rule" in text for text in reader.texts("table.sides td.line"))
    reader.go(view="schedule")
    reader.page.wait_for_function(
        "() => document.getElementById('view').innerText.includes('delta_step')"
    )
    reader.check_quiet()
    reader.page.close()
