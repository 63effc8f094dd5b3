"""The page of a mixture of experts: which experts, or which part of each, a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.reader import watch
from tpcompile.exploring import explore

HELD = {
    "tp": ("8 × 16", "Features of each expert: 48", "rank 1 holds 8 to 15"),
    "ep": ("3 × 48", "Experts, each whole on a rank: 8", "rank 1 holds 3 to 5"),
}
"""What rank 1 of 3 holds of 8 experts with 48 features, by the plan."""


@pytest.mark.parametrize("experts", HELD)
def test_shares_of_experts(
    experts: str, browser: Any, session_captures: None, tmp_path: Path
) -> None:
    explored = explore("preset:tiny-qwen3-moe", 3, target="cpu", workers=2, experts=experts)
    explored.write(tmp_path / "report.html")
    reader = watch(browser.new_page())
    reader.open((tmp_path / "report.html").as_uri())
    plan = explored.compilations[0]["plan"]
    extent, title, held = HELD[experts]
    for compilation in (0, 1):
        reader.go(view="ranks", c=compilation)
        columns, *ranks = reader.rows("table.shares")
        assert columns[-2:] == ["experts × features", "weights of experts"]
        assert "ffn" not in columns, "the model has no MLP without experts"
        assert ranks[1][-2] == extent
        sizes = [float(row[-1].removesuffix(" KB")) * 1000 for row in ranks]
        wanted = [share["expert_bytes"] for share in plan["ranks"]]
        assert sizes == pytest.approx(wanted, abs=5)
        ways = [row for row in reader.rows("table.ways") if "p: " in row[0]]
        assert [row[0].endswith("(chosen)") for row in ways] == [experts == "tp", experts == "ep"]
        assert title in reader.text("#view")
        strips = reader.page.locator('svg[role="img"]')
        labels = [strips.nth(n).get_attribute("aria-label") for n in range(strips.count())]
        assert any(f"; {held};" in label for label in labels)
    reader.check_quiet()
    reader.page.close()
