"""What fits on a screen: the drawing and the source on a small laptop, and all views on a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.reader import Reader
from tests.browser.test_places import VIEWS

BOXES = """() => {
  const frame = document.querySelector(".picture").getBoundingClientRect();
  const layer = document.querySelector("svg.graph .cluster").getBoundingClientRect();
  const nodes = [...document.querySelectorAll("svg.graph .node")]
    .map(one => one.getBoundingClientRect())
    .filter(one => one.right > frame.left && one.left < frame.right && one.bottom > frame.top
      && one.top < frame.bottom);
  const lefts = Math.min(...nodes.map(one => one.left)) - frame.left;
  const rights = frame.right - Math.max(...nodes.map(one => one.right));
  return {
    inside: layer.left >= frame.left && layer.right <= frame.right,
    share: (Math.min(layer.bottom, frame.bottom) - Math.max(layer.top, frame.top)) / layer.height,
    empty: (Math.max(lefts, 0) + Math.max(rights, 0)) / frame.width,
  };
}"""
"""Whether the first layer is between the sides of the drawing, its visible part, and the part of
the drawing's width that has no values."""


SINGLE = """() => {
  const linked = new Set([...document.querySelectorAll("svg.graph .edge[data-from]")]
    .flatMap(one => [one.dataset.from, one.dataset.to]));
  const nodes = [...document.querySelectorAll("svg.graph .node")];
  const right = (linked_) => Math.max(0, ...nodes
    .filter(one => linked.has(one.dataset.name) === linked_)
    .map(one => one.getCTM().e + one.getBBox().width));
  return [right(false), Math.max(right(true), 800)];
}"""
"""The right ends of values without edges, and of the others."""


@pytest.fixture
def resized(reader: Reader) -> Iterator[Reader]:
    yield reader
    reader.page.set_viewport_size({"width": 1500, "height": 1000})


def test_the_first_layer_fits(resized: Reader) -> None:
    resized.page.set_viewport_size({"width": 1400, "height": 900})
    resized.go(view="graph", c=0)
    fit = resized.page.evaluate(BOXES)
    assert fit["inside"] and fit["share"] > 0.9
    assert fit["empty"] < 0.35
    resized.click("button[aria-label='Larger']")
    resized.click("button[aria-label='Larger']")
    assert not resized.page.evaluate(BOXES)["inside"]
    resized.page.get_by_role("button", name="Fit the first layers").click()
    assert resized.page.evaluate(BOXES) == fit


def test_values_without_edges_do_not_widen_the_drawing(reader: Reader) -> None:
    reader.go(view="graph", c=0)
    single, linked = reader.page.evaluate(SINGLE)
    assert 0 < single <= linked


def test_source_lines_are_whole(resized: Reader) -> None:
    resized.page.set_viewport_size({"width": 1400, "height": 900})
    resized.go(view="graph", c=0)
    cut = resized.page.eval_on_selector(".source", "one => one.scrollWidth - one.clientWidth")
    assert cut <= 0


@pytest.mark.parametrize("width", [390, 1024])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_the_screen(resized: Reader, view: str, width: int) -> None:
    resized.page.set_viewport_size({"width": width, "height": 844})
    resized.go(view=view)
    if view == "schedule":
        resized.page.wait_for_selector("body[data-schedule]")
    for part in ("document.documentElement", "document.getElementById('view')"):
        assert resized.page.evaluate(f"() => {part}.scrollWidth - {part}.clientWidth") <= 0, part


def test_details_are_folded_on_a_phone(resized: Reader) -> None:
    resized.page.set_viewport_size({"width": 390, "height": 844})
    resized.go(view="pipeline", **{"pass": "fuse-qkv"})
    details = resized.page.locator("#details")
    assert not details.is_visible()
    resized.click("#fold")
    assert details.is_visible()
    resized.click("#fold")
    resized.go(view="pipeline", **{"pass": "fuse-qkv", "node": "l0_q_k_v_proj"})
    assert details.is_visible(), "a chosen value shows its details"
    resized.page.set_viewport_size({"width": 1400, "height": 900})
    resized.go(view="pipeline")
    assert details.is_visible(), "a wide screen has room for them"
