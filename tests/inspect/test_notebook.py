"""Tests of the HTML for notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import tpcompile
from tests.inspect.stages import lowered
from tpcompile.inspect.notebook import graph_html, table_html
from tpcompile.ir.info import info_of
from tpcompile.ir.text.printer import Printer

pytestmark = pytest.mark.usefixtures("captured_once")
HOSTILE = "</pre><script>alert(1)</script>\" onload='x'"


class _Reader(HTMLParser):
    """A reader of the text and the tags of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_graph_has_a_line_for_each_node_and_folds_layers() -> None:
    gm = lowered(2)
    reader = _Reader(graph_html(gm, "the title"))
    printer = Printer(origins=False)
    lines = [printer.node(node) for node in gm.graph.nodes]
    assert [word for word in reader.words if word in set(lines)] == lines
    assert reader.tags.count("details") == reader.tags.count("/details")
    assert {"layer 0", "layer 1", "the title"} <= set(reader.words)


def test_names_are_text() -> None:
    gm = lowered(2)
    info_of(gm).name = HOSTILE
    for html in (graph_html(gm, HOSTILE), table_html(HOSTILE, [HOSTILE], [[HOSTILE, 1]])):
        reader = _Reader(html)
        assert "script" not in reader.tags
        assert HOSTILE in "".join(reader.words)


def test_stages_plans_and_schedules_have_html() -> None:
    step = tpcompile.schedule("preset:tiny-qwen3", target="cpu", workers=2)
    with tpcompile.compile(
        "preset:tiny-qwen3", tp=2, random_weights=0, simulate=True, backend="torch"
    ) as model:
        stage, plan = _Reader(model.stages[-1]._repr_html_()), _Reader(model.plan._repr_html_())
    assert "tiny-qwen3 after keep-states" in stage.words
    assert "all_reduce" in plan.words
    shown = _Reader(step._repr_html_())
    assert "svg" in shown.tags and "critical path" in shown.words
