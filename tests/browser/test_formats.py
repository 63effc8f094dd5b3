"""The page of a model whose weights are quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.reader import watch
from tpcompile.exploring import explore


def test_bytes_of_formats(browser: Any, session_captures: None, tmp_path: Path) -> None:
    explored = explore("preset:tiny-qwen3", 2, target="cpu", workers=2, weights="int4:16")
    formats = explored.compilations[0]["plan"]["formats"]
    assert set(formats) == {"int4:16:f32", "int8:16:f32", "f32"}
    explored.write(tmp_path / "report.html")
    reader = watch(browser.new_page())
    reader.open((tmp_path / "report.html").as_uri())
    reader.go(view="ranks")
    rows = [row for row in reader.rows("#view table") if row[0] in formats]
    assert [row[0] for row in rows] == list(formats)
    assert "81" in dict(rows)["int8:16:f32"], "81,040 bytes"
    reader.check_quiet()
    reader.page.close()
