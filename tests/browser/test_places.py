"""Places in the page: addresses, back and forward, keys, the search, the theme and print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.checks.schedule import shown
from tests.browser.checks.texts import names
from tests.browser.reader import Reader, watch
from tests.browser.subject import TP, Truth

VIEWS = ["overview", "pipeline", "graph", "ranks", "schedule", "compare"]


def selected(reader: Reader) -> str:
    """Return the title of the view that is shown, of all tabs."""
    return reader.text('#tabs [aria-selected="true"]')


def pressed(reader: Reader) -> str:
    """Return the pass that is shown."""
    return reader.text('button.pass[aria-pressed="true"] b')


def test_every_view_has_a_tab_and_a_key(reader: Reader) -> None:
    titles = reader.texts("#tabs button")
    assert [title.lower() for title in titles] == VIEWS
    for number, view in enumerate(VIEWS, 1):
        reader.page.keyboard.press(str(number))
        assert reader.place["view"] == view
        assert selected(reader).lower() == view


def test_an_address_leads_to_a_place(reader: Reader, report: Path) -> None:
    place = "#view=graph&c=1&pass=split-attention&node=l2_o_proj"
    reader.page.goto("about:blank")
    reader.open(report.as_uri() + place)
    assert selected(reader) == "Graph"
    assert reader.texts("#details h2") == ["%l2_o_proj"]
    assert f"after split-attention, decode step, tp={TP}" in reader.text("#details")
    chosen = reader.page.locator("svg.graph .node.chosen").get_attribute("data-name")
    assert chosen == "l1_o_proj"  # the drawing shows the first of the folded layers


def test_a_wrong_address_is_no_error(reader: Reader) -> None:
    for place in ({"view": "x"}, {"c": "99"}, {"pass": "x"}, {"node": "x"}, {"left": "9:9"}):
        reader.go(**place)
        assert selected(reader) in ("Overview", "Pipeline", "Graph")
    reader.go(view="pipeline", node="<b>x</b>")
    assert "No stage has this value" in reader.text("#details")


def test_back_and_forward(reader: Reader) -> None:
    reader.click("button.pass b", "fuse-qkv")
    reader.click("button.pass b", "fuse-gate-up")
    reader.page.keyboard.press("4")
    assert selected(reader) == "Ranks"
    reader.page.go_back()
    assert (selected(reader), pressed(reader)) == ("Pipeline", "fuse-gate-up")
    reader.page.go_back()
    assert pressed(reader) == "fuse-qkv"
    reader.page.go_forward()
    assert pressed(reader) == "fuse-gate-up"


def test_keys_step_through_the_passes(reader: Reader, truth: Truth) -> None:
    passes = [stage.name for stage in truth.stages]
    reader.go(view="pipeline", **{"pass": "canonicalize"})
    visited = []
    for _ in passes:
        visited.append(pressed(reader))
        reader.page.keyboard.press("j")
    assert visited == [*passes[1:], passes[-1]]
    reader.page.keyboard.press("k")
    assert pressed(reader) == passes[-2]
    reader.page.keyboard.press("3")
    reader.page.keyboard.press("k")
    assert reader.place == {"view": "graph", "c": "0", "pass": passes[-3]}


def test_the_list_of_keys(reader: Reader) -> None:
    reader.page.keyboard.press("?")
    dialog = reader.page.locator("dialog#keys")
    assert dialog.is_visible()
    text = dialog.inner_text()
    assert all(word in text for word in ("search", "go to a view", "the next and the previous"))
    reader.page.keyboard.press("3")  # keys of the page are off while a dialog is open
    assert selected(reader) == "Pipeline"
    reader.page.keyboard.press("Escape")
    assert not dialog.is_visible()
    reader.click("#help")
    assert dialog.is_visible()
    dialog.get_by_role("button").click(timeout=3000)
    assert not dialog.is_visible()


@pytest.mark.parametrize(
    ("words", "expected", "other"),
    [
        ("qkv weight", "%l0_q_k_v_proj_weight", "%l0_o_proj_weight"),
        ("l1_swiglu", "%l1_swiglu", "%l0_swiglu"),
        ("SWIGLU gate", "l0_norm_gate_up_swiglu", "tpc.rope("),
        ("layer 1 rank 2", "layer 1 rank 2", "layer 2 rank 1"),
        ("param(model q_norm", "q_norm_weight", "k_norm_weight ="),
    ],
)
def test_search_finds_all_of_the_words(
    reader: Reader, words: str, expected: str, other: str
) -> None:
    shown(reader)  # so that its instructions can be found
    reader.go(view="pipeline", c=1)
    reader.page.locator("#search").fill(words)
    results = reader.texts("#found button")
    assert any(expected in text for text in results), results
    assert not any(other in text for text in results), results
    reader.page.locator("#search").fill("")


def test_search(reader: Reader) -> None:
    reader.page.keyboard.press("/")
    reader.page.keyboard.type("l2_q_rotated")
    results = reader.texts("#found button")
    assert results[0].endswith("Shard(1, q_heads)") and names(results[:1])[0] == "l2_q_rotated"
    reader.page.keyboard.press("Enter")
    assert reader.texts("#details h2") == ["%l2_q_rotated"]
    assert not reader.page.locator("#found").is_visible()
    reader.page.keyboard.press("/")
    reader.page.locator("#search").fill("fuse-gate")
    reader.page.keyboard.press("ArrowDown")
    reader.page.keyboard.press("Enter")
    assert pressed(reader) == "fuse-gate-up"
    reader.page.locator("#search").fill("q_proj.weight")
    assert any("model.layers" in text for text in reader.texts("#found button"))
    reader.page.locator("#search").fill("no such thing")
    assert reader.text("#found") == "Nothing found"
    reader.page.keyboard.press("Escape")
    assert not reader.page.locator("#found").is_visible()
    reader.page.locator("#search").fill("")


def test_keys_are_letters_while_one_types(reader: Reader) -> None:
    reader.page.keyboard.press("/")
    reader.page.keyboard.type("3j?")
    assert reader.page.locator("#search").input_value() == "3j?"
    assert selected(reader) == "Pipeline"
    reader.page.keyboard.press("Escape")
    reader.page.locator("#search").fill("")
    reader.page.locator("#search").blur()


def test_two_pipelines_side_by_side_are_chosen_in_lists(reader: Reader, truth: Truth) -> None:
    lists = reader.page.locator('select[aria-label="Stage on the left"]')
    assert lists.locator("optgroup").evaluate_all("all => all.map(one => one.label)") == [
        f"prompts, tp={TP}",
        f"decode step, tp={TP}",
        "prompts, tp=2",
    ]
    lists.select_option("2:0")
    assert reader.texts("table.sides thead th")[0] == "prompts, tp=2: capture"
    assert reader.place["left"] == "2:0"


def test_folded_lines_and_layers_are_opened(reader: Reader, truth: Truth) -> None:
    reader.go(view="pipeline", **{"pass": "fuse-qkv"})
    marks = reader.page.locator("tr.folded button")
    before = marks.count()
    hidden = int(marks.first.inner_text().split()[1])
    shown = reader.page.locator("table.sides td.line").count()
    marks.first.click()
    assert marks.count() == before - 1
    assert reader.page.locator("table.sides td.line").count() == shown + 2 * hidden
    layer = reader.page.locator('input[aria-label="Layer to show, from 1 to 2"]')
    layer.fill("2")
    layer.press("Enter")
    text = truth.lines.stages["fuse-qkv"]["l2_q_k_v_proj"][1]
    assert text in reader.texts("table.sides td.line")


def test_the_theme(reader: Reader) -> None:
    colour = "() => getComputedStyle(document.body).backgroundColor"
    reader.page.emulate_media(color_scheme="light")
    light = reader.page.evaluate(colour)
    reader.click("#theme")
    dark = reader.page.evaluate(colour)
    reader.click("#theme")
    assert reader.page.evaluate(colour) == light != dark
    reader.page.evaluate("() => delete document.documentElement.dataset.theme")
    reader.page.emulate_media(color_scheme="dark")
    assert reader.page.evaluate(colour) == dark
    reader.page.emulate_media(color_scheme="light")


def test_the_theme_is_kept(browser: Any, report: Path) -> None:
    reader = watch(browser.new_page(color_scheme="light"))
    theme = "() => document.documentElement.dataset.theme"
    reader.open(report.as_uri())
    assert reader.page.evaluate(theme) is None
    reader.click("#theme")
    reader.open(report.as_uri())
    assert reader.page.evaluate(theme) == "dark"
    reader.check_quiet()
    reader.page.close()


def test_a_browser_without_storage(browser: Any, report: Path) -> None:
    reader = watch(browser.new_page(color_scheme="light"))
    reader.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('refused'); } })"
    )
    reader.open(report.as_uri())
    reader.click("#theme")
    assert reader.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    reader.check_quiet()
    reader.page.close()


def test_print(reader: Reader) -> None:
    reader.go(view="ranks")
    reader.page.emulate_media(media="print")
    assert not reader.page.locator("#tools").is_visible()
    assert not reader.page.locator("#tabs").is_visible()
    module = reader.page.locator("#view")
    whole = module.evaluate("one => one.scrollHeight - one.clientHeight")
    assert whole <= 0, "the view must not scroll on paper"
    reader.page.emulate_media(media="screen")
    assert reader.page.locator("#tools").is_visible()
