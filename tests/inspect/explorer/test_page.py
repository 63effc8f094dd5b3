"""The page: one file in which data are data, and only the page's own script may run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tpcompile.inspect.explorer.page import page_html

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "' onload='window.hacked = 1",
    "</title><h1>hacked</h1>",
    "<!--",
    "]]>",
    "&lt;script&gt;",
    "@@TITLE@@ @@SCRIPTS@@ @@",
    "two\nlines\r\nand\x00more\x01\x02\x1b[31m",
    "\u2028 \u202e \ud7ff",
    "\\\"'`${window.hacked = 1}",
]


class Page(HTMLParser):
    """The elements of a page, with the text from each start tag to the next tag."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[int, str] = {}
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            place = len(self.elements) - 1
            self.text[place] = self.text.get(place, "") + data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        """Return the attributes and the text of each element."""
        return [
            (attributes, self.text.get(place, ""))
            for place, (name, attributes) in enumerate(self.elements)
            if name == tag
        ]


def blob(page: Page, name: str) -> bytes:
    """Return the content of a part of the page."""
    texts = [
        text for attributes, text in page.all("script") if attributes.get("id") == f"blob-{name}"
    ]
    assert len(texts) == 1
    return gzip.decompress(base64.b64decode(texts[0]))


def test_data_come_back() -> None:
    data = {"title": "t", "more": [1, None, "é \u2028"]}
    page = Page(page_html("t", data, {"schedule": bytes(range(256))}))
    assert json.loads(blob(page, "page")) == data
    assert blob(page, "schedule") == bytes(range(256))


def test_the_policy_allows_the_script_of_the_page_and_nothing_else() -> None:
    page = Page(page_html("t", {}, {"schedule": b"0"}))
    policies = [a["content"] for a, _ in page.all("meta") if a.get("http-equiv")]
    scripts = [text for attributes, text in page.all("script") if "type" not in attributes]
    assert len(policies) == len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert policies[0] is not None
    assert set(policies[0].split("; ")) == {
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",
    }


def test_the_page_needs_nothing_else() -> None:
    """No element loads anything, and no script or style names an address to load from."""
    text = page_html("t", {}, {})
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "srcset", "action", "background"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    for _, style in page.all("style"):
        assert "url(" not in style and "@import" not in style
    ours = text.partition('"use strict";')[2]
    for loader in (r"\bfetch\(", "XMLHttpRequest", "WebSocket", "EventSource", r"\bimport\("):
        assert not re.search(loader, ours), loader
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in ours, sink


@pytest.mark.parametrize("name", HOSTILE)
def test_names_never_become_markup(name: str) -> None:
    plain = Page(page_html("plain", _data("plain"), {}))
    page = Page(page_html(name, _data(name), {}))
    assert _shape(page) == _shape(plain)
    [(_, title)] = page.all("title")
    assert title == name
    assert json.loads(blob(page, "page")) == _data(name)


def _data(name: str) -> dict[str, Any]:
    row = {"text": f"%a = param({name})", "name": name, "origin": [name, name, 1]}
    return {"title": name, "recordings": [{"lines": [row]}], "sources": {name: name}}


def _shape(page: Page) -> list[tuple[str, list[str]]]:
    """Return the elements with the names of their attributes."""
    return [(tag, sorted(attributes)) for tag, attributes in page.elements]


def test_a_page_is_deterministic() -> None:
    pages = {page_html("t", {"b": 1, "a": [2]}, {"schedule": b"123"}) for _ in range(2)}
    assert len(pages) == 1
