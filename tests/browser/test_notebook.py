"""Stages, plans and schedules as a notebook shows them."""

from __future__ import annotations

from typing import Any

import pytest

import tpcompile
from tests.browser.axe import problems
from tests.browser.reader import Reader, watch
from tpcompile.runtime.model import CompiledModel


@pytest.fixture(scope="module")
def model() -> Any:
    compiled = tpcompile.compile(
        "preset:tiny-qwen3", tp=3, random_weights=0, simulate=True, backend="torch"
    )
    with compiled as model:
        yield model


def shown(browser: Any, html: str) -> Reader:
    """Show HTML inside of a document, as a notebook does."""
    reader = watch(browser.new_page())
    reader.page.set_content(
        f"<!doctype html><html lang='en'><title>Notebook</title><main>{html}</main></html>"
    )
    return reader


def test_a_stage(browser: Any, model: CompiledModel) -> None:
    stage = model.stages[-1]
    reader = shown(browser, stage._repr_html_())
    layer = reader.page.locator("details", has_text="layer 1").first
    line = layer.locator("div").first
    assert not line.is_visible(), "layers are folded"
    layer.locator("summary").click()
    assert line.is_visible()
    assert line.inner_text().startswith("%l1_")
    reader.check_quiet()
    reader.page.close()


def test_a_plan(browser: Any, model: CompiledModel) -> None:
    reader = shown(browser, model.plan._repr_html_())
    text = reader.page.inner_text("main")
    assert all(f"{rank}" in text for rank in range(3))
    rows = [row for row in reader.rows("table") if row]
    assert len(rows) >= 3
    reader.check_quiet()
    reader.page.close()


def test_a_schedule(browser: Any) -> None:
    step = tpcompile.schedule("preset:tiny-qwen3", target="cpu", workers=2)
    reader = shown(browser, step._repr_html_())
    box = reader.page.locator("svg").first.bounding_box()
    assert box and box["width"] > 300 and box["height"] > 50
    figures = dict(row[:2] for row in reader.rows("table") if len(row) == 2)
    assert figures["instructions"] == f"{len(step.program.instructions):,}"
    reader.check_quiet()
    reader.page.close()


@pytest.mark.parametrize("which", ["stage", "plan"])
def test_accessibility(browser: Any, model: CompiledModel, which: str) -> None:
    html = (model.stages[-1] if which == "stage" else model.plan)._repr_html_()
    reader = shown(browser, html)
    assert problems(reader, {}) == []
    reader.page.close()
