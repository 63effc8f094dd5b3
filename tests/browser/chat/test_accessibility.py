"""The page has no problem that axe-core calls serious, and fits on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.axe import problems
from tests.browser.chat.conftest import Chat, chatting
from tests.browser.chat.replies import Replies, called, delta, spoken

TEXT = """Some **text** with `code`.

```python
print("a line that is much longer than a phone is wide, so that it has to scroll in its own frame")
```

| a | b | c |
|---|---|---|
| a long cell of a table | another long cell | one more of them |

> A quote, and """ + "a" * 200  # fmt: skip


def nothing(chat: Chat) -> None:
    """Leave the page as it begins."""


def conversation(chat: Chat) -> None:
    """Show every kind of message."""
    thought = [delta(reasoning_content="I think of " + "a" * 100)]
    chat.told("Hello " + "a" * 100, [*thought, *spoken(TEXT)])
    chat.told("Another", (400, "It is refused"))
    chat.set("tools", '{"name": "weather"}')
    chat.ask("The weather", called(("weather", '{"city": "' + "a" * 100 + '"}'), thought="Hm."))
    chat.page.locator(".call textarea").wait_for()
    chat.click("details.thinking summary", first=True)


def settings(chat: Chat) -> None:
    """Show the settings, with values that are refused."""
    chat.set("tools", "[")
    chat.set("schema", "[")
    chat.click("#settings-button")


STATES: dict[str, Callable[[Chat], None]] = {
    show.__name__: show for show in (nothing, conversation, settings)
}
SIZES = ((1400, 900), (390, 844))
LOOKS = [
    (state, scheme, SIZES[(row + column) % 2])
    for row, state in enumerate(STATES)
    for column, scheme in enumerate(("light", "dark"))
]
"""Each state is light and dark, and wide and narrow."""


@pytest.mark.parametrize(("state", "scheme", "size"), LOOKS)
def test_no_serious_problem(
    browser: Any, replies: Replies, state: str, scheme: str, size: tuple[int, int]
) -> None:
    viewport = dict(zip(("width", "height"), size, strict=True))
    options = {"viewport": viewport, "color_scheme": scheme, "bypass_csp": True}
    with chatting(browser, replies.url, replies, **options) as chat:
        STATES[state](chat)
        assert problems(chat, {}) == []
        wide = chat.page.evaluate(
            """() => [document.documentElement, ...document.querySelectorAll("#log, #settings")]
              .filter(one => one.scrollWidth > one.clientWidth).map(one => one.id)"""
        )
        assert wide == [], "only code and tables scroll sideways"


def test_a_problem_is_found(browser: Any, replies: Replies) -> None:
    with chatting(browser, replies.url, replies, bypass_csp=True) as chat:
        chat.page.evaluate(
            "() => document.getElementById('log').append(document.createElement('button'))"
        )
        assert any("button-name" in problem for problem in problems(chat, {}))


def test_the_theme(browser: Any, replies: Replies) -> None:
    colour = "() => getComputedStyle(document.body).backgroundColor"
    with chatting(browser, replies.url, replies, color_scheme="light") as chat:
        light = chat.page.evaluate(colour)
        chat.click("#theme")
        dark = chat.page.evaluate(colour)
        chat.open(replies.url)
        assert chat.page.evaluate(colour) == dark != light, "the theme is kept"


def test_the_box_stays_in_view_on_a_phone(browser: Any, replies: Replies) -> None:
    options = {"viewport": {"width": 390, "height": 500}}
    with chatting(browser, replies.url, replies, **options) as chat:
        conversation(chat)
        chat.page.fill("#prompt", "\n".join(["A line"] * 40))
        box = chat.page.locator("#send").bounding_box()
        assert box["y"] + box["height"] <= 500 and box["x"] + box["width"] <= 390


def test_settings_that_cover_the_page_keep_the_focus(browser: Any, replies: Replies) -> None:
    behind = "() => document.activeElement.closest('header, main') !== null"
    for width, reached in ((390, False), (1400, True)):
        options = {"viewport": {"width": width, "height": 800}}
        with chatting(browser, replies.url, replies, **options) as chat:
            chat.click("#settings-button")
            chat.page.keyboard.press("Shift+Tab")
            assert chat.page.evaluate(behind) is reached
            chat.page.keyboard.press("Escape")
            assert chat.page.locator("#prompt").evaluate("one => one === document.activeElement")
