"""The page on a server that replays streams, and a reader who uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.browser.chat.replies import Replies, serving
from tests.browser.reader import Reader


@dataclass
class Chat(Reader):
    """A reader of the page: writes messages, and reads answers."""

    replies: Replies = field(default_factory=Replies)

    def ask(self, text: str, *answers: Any) -> None:
        """Write a message and press Enter; the server will give these answers."""
        self.replies.answers += answers
        box = self.page.locator("#prompt")
        box.fill(text)
        box.press("Enter")

    def done(self) -> None:
        """Wait until no answer is coming."""
        self.page.wait_for_selector("#stop", state="hidden")
        self.page.wait_for_selector("article[aria-busy=true]", state="detached")

    def told(self, text: str, *answers: Any) -> str:
        """Write a message, and return the text of the last answer."""
        self.ask(text, *answers)
        self.done()
        return self.texts("article.assistant .content")[-1]

    @property
    def said(self) -> str:
        """The text that is read aloud."""
        return self.text("#status")

    def set(self, name: str, value: str) -> None:
        """Change a setting in the panel, and close it."""
        if not self.page.locator("#settings").is_visible():
            self.click("#settings-button")
        field = self.page.locator(f"#{name}")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
        self.click("#close")


Open = Callable[..., Chat]


@pytest.fixture
def replies() -> Iterator[Replies]:
    replies = Replies()
    with serving(replies.app()) as replies.url:
        yield replies


@contextmanager
def chatting(browser: Any, url: str, replies: Replies, **options: Any) -> Iterator[Chat]:
    """Open the page; afterwards it must have had no error, and asked no other server."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    page = context.new_page()
    page.set_default_timeout(10_000)
    chat = Chat(page, replies=replies)
    _watch(chat, url)
    chat.open(url)
    yield chat
    chat.check_quiet()
    context.close()


def _watch(chat: Chat, url: str) -> None:
    def sent(request: Any) -> None:
        if not request.url.startswith((url, "data:")):
            chat.problems.append(f"request of {request.url}")

    def written(message: Any) -> None:
        if "Failed to load resource" not in message.text:  # the page shows these itself
            chat.problems.append(f"console: {message.text}")

    chat.page.on("request", sent)
    chat.page.on("console", written)
    chat.page.on("pageerror", lambda error: chat.problems.append(f"error: {error}"))


@pytest.fixture
def chat(browser: Any, replies: Replies) -> Iterator[Chat]:
    with chatting(browser, replies.url, replies) as opened:
        yield opened
