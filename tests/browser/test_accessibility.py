"""No view has an accessibility problem that axe-core calls serious or critical."""

from __future__ import annotations

import pytest

from tests.browser.axe import problems
from tests.browser.reader import Reader

PLACES: dict[str, dict[str, str]] = {
    "overview": {},
    "pipeline": {"pass": "fuse-qkv", "node": "l0_q_k_v_proj"},
    "graph": {"pass": "fuse-qkv", "node": "l0_swiglu"},
    "ranks": {"node": "l0_o_proj_sum"},
    "schedule": {"instruction": "5"},
    "compare": {"node": "l0_swiglu"},
}
COLOURS = {"runOnly": ["color-contrast"]}


WIDTHS = (1500, 390)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", PLACES)
def test_no_serious_problem(view: str, width: int, reader: Reader) -> None:
    reader.page.set_viewport_size({"width": width, "height": 1000})
    reader.go(view=view, **PLACES[view])
    if view == "schedule":
        reader.page.wait_for_selector("body[data-schedule]")
    assert problems(reader, {}) == []
    reader.page.emulate_media(color_scheme="dark")
    assert problems(reader, COLOURS) == []
    reader.page.emulate_media(color_scheme="light")
    reader.page.set_viewport_size({"width": WIDTHS[0], "height": 1000})


def test_a_problem_is_found(reader: Reader) -> None:
    reader.page.evaluate(
        """() => document.getElementById("view").append(
          Object.assign(document.createElement("button"), { id: "bad", style: "color: #eee" }))"""
    )
    assert any("button-name" in problem for problem in problems(reader, {}))
    reader.page.evaluate("() => document.getElementById('bad').remove()")
