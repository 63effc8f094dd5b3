"""The part of Markdown that the page shows, and that nothing in it becomes markup."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.browser.chat.conftest import Chat

SHOW = """async text => {
  const { showMarkdown } = await import("./page/markdown.js");
  const holder = document.createElement("div");
  showMarkdown(holder, text);
  return holder.innerHTML;
}"""
GROW = """async ([text, size]) => {
  const { showMarkdown } = await import("./page/markdown.js");
  const [whole, grown] = [document.createElement("div"), document.createElement("div")];
  showMarkdown(whole, text);
  for (let at = 0; at <= text.length + size; at += size) showMarkdown(grown, text.slice(0, at));
  const tags = [...whole.querySelectorAll("*")].map(one => one.tagName);
  return [whole.innerHTML === grown.innerHTML, whole.textContent, [...new Set(tags)]];
}"""

CASES = {
    "paragraphs": ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    "spaces": ("  a\n\n b ", "<p>a</p><p>b</p>"),
    "bold": ("a **b c** d", "<p>a <strong>b c</strong> d</p>"),
    "italics": ("*a* 2*3*4", "<p><em>a</em> 2<em>3</em>4</p>"),
    "products": ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
    "code": ("`a <b> *c*`", "<p><code>a &lt;b&gt; *c*</code></p>"),
    "ticks": ("``a ` b`` `", "<p><code>a ` b</code> `</p>"),
    "escapes": (r"\*a\*", "<p>*a*</p>"),
    "heading": ("## A `b`", "<h4>A <code>b</code></h4>"),
    "list": ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
    "numbers": ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "quote": ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    "markup": ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    "links": ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
}


@pytest.mark.parametrize("name", CASES)
def test_texts(chat: Chat, name: str) -> None:
    text, markup = CASES[name]
    assert chat.page.evaluate(SHOW, text) == markup


def test_code(chat: Chat) -> None:
    for text in ("```py\nx < 1\n```", "```py\nx < 1"):
        shown = chat.page.evaluate(SHOW, text)
        assert "<span>py</span>" in shown and "<code>x &lt; 1</code>" in shown


def test_table(chat: Chat) -> None:
    shown = chat.page.evaluate(SHOW, "| a | b |\n|---|:-:|\n| 1 | **2** |")
    assert "<th>a</th><th>b</th>" in shown
    assert "<td>1</td><td><strong>2</strong></td>" in shown


@pytest.mark.parametrize("text", [">" * 20_000, "- " * 20_000, "**" * 20_000, "`" * 9_999 + "a`"])
def test_deep_texts_are_shown_in_time(chat: Chat, text: str) -> None:
    assert len(chat.page.evaluate(SHOW, text)) > 1000


MARKS = st.sampled_from(
    [*"abc \n\n", "*", "**", "`", "```", "> ", "- ", "1. ", "# ", "|", "<b>", "\\"]
)
TAGS = {
    *("P", "STRONG", "EM", "CODE", "PRE", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "BLOCKQUOTE"),
    *("UL", "OL", "LI", "H3", "H4", "H5", "H6", "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(MARKS, max_size=40).map("".join), st.integers(1, 7))
def test_a_text_that_grows_is_shown_as_the_whole(chat: Chat, text: str, size: int) -> None:
    same, shown, tags = chat.page.evaluate(GROW, [text, size])
    assert same
    assert set(tags) <= TAGS
    assert all(shown.count(letter) >= text.count(letter) for letter in "abc"), "nothing is lost"
