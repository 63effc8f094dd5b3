"""A page whose names are attacks: they are shown as text, and nothing runs or is loaded."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.reader import Reader, watch
from tests.inspect.explorer.test_page import HOSTILE, Page, blob
from tpcompile.exploring import Exploration

ATTACK = " ".join(HOSTILE)
TEXTS = {"text", "title", "model", "class", "origin", "recipe", "tensor", "nearest", "source"}
TEXTS |= {"problem", "modules", "sources", "decode step"}
"""The parts of the data that have words of a model or of its files."""


def attacked(value: Any, inside: bool = False) -> Any:
    """Return data with the attack at the end of every text that may come from a model."""
    if isinstance(value, dict):
        return {key: attacked(item, inside or key in TEXTS) for key, item in value.items()}
    if isinstance(value, list):
        return [attacked(item, inside) for item in value]
    return f"{value} {ATTACK}" if inside and isinstance(value, str) else value


@pytest.fixture(scope="module")
def hostile(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = report.read_text(encoding="utf-8")
    data = json.loads(blob(Page(text), "page"))
    schedule = data.pop("schedule")
    data = attacked(data) | {"schedule": schedule}
    # The file names of sources are keys, which lines cite.
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode())).decode()
    start = text.index('id="blob-page">') + len('id="blob-page">')
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    path.write_text(text[:start] + packed + text[text.index("</script>", start) :])
    return path


def test_names_are_shown_as_text(browser: Any, hostile: Path) -> None:
    page = browser.new_page()
    reader = watch(page)
    reader.open(hostile.as_uri())
    assert page.inner_text("h1").endswith(" ".join(ATTACK.split())[-20:])
    for place in (
        {"view": "pipeline", "pass": "fuse-qkv", "node": "l0_q_k_v_proj_weight"},
        {"view": "graph", "node": "l1_o_proj"},
        {"view": "ranks", "node": "l1_o_proj_sum"},
        {"view": "compare", "node": "l1_o_proj"},
        {"view": "schedule"},
        {"view": "pipeline", "node": ATTACK, "pass": ATTACK, "left": ATTACK, "layer": ATTACK},
    ):
        reader.go(**place)
        page.locator("#search").fill("window.hacked")
        page.locator("#search").fill("")
        kinds = page.evaluate(
            "() => [...document.querySelectorAll('#view, #details, #found, header')]"
            ".flatMap(one => [...one.querySelectorAll('script, img, iframe, object, link')]).length"
        )
        assert kinds == 0
    reader.go(view="pipeline", node="l0_q_k_v_proj_weight")
    assert "</script><script>window.hacked = 1</script>" in reader.text("#details")
    reader.check_quiet()
    page.close()


def test_the_policy_stops_scripts_that_are_not_the_page_s(browser: Any, report: Path) -> None:
    page = browser.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-ready]")
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
          const image = document.createElement("img");
          image.setAttribute("onerror", "window.hacked = 1");
          image.src = "https://example.org/x.png";
          document.body.append(image);
        }"""
    )
    page.wait_for_timeout(50)
    assert page.evaluate("() => window.hacked") is None
    assert len([text for text in messages if "Content Security Policy" in text]) >= 2
    page.close()


def test_a_hostile_configuration(browser: Any, tmp_path: Path, exploration: Exploration) -> None:
    name = HOSTILE[1]
    renamed = Exploration(f"{name}, tp=2", {"model": name}, exploration.recordings)
    renamed.compilations = exploration.compilations
    path = tmp_path / "report.html"
    renamed.write(path)
    page = browser.new_page()
    reader: Reader = watch(page)
    reader.open(path.as_uri())
    assert reader.text("h1") == page.title() == f"{name}, tp=2"
    assert name in dict(reader.rows("table.overview-facts"))["Model"]
    assert reader.texts("#tabs button") == ["Overview", "Pipeline", "Graph", "Ranks"]
    reader.check_quiet()
    page.close()
