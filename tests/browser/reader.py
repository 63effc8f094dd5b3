"""A reader of a page: goes to places, clicks, and returns the text that is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_GO = """place => {
  history.replaceState(null, "", "#" + new URLSearchParams(place));
  Explorer.render();
}"""
_TEXTS = "(all) => all.map(one => (one.innerText ?? one.textContent).trim())"
_CELLS = "(rows) => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"


@dataclass
class Reader:
    """A page, with everything that went wrong in it."""

    page: Any
    problems: list[str] = field(default_factory=list)
    """Errors, messages on the console, dialogs, and requests of anything but the file."""

    def open(self, address: str) -> None:
        """Open a page, and wait until it shows its first view."""
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]")

    def reset(self) -> None:
        """Return to the Pipeline view of the page, with all of its data and the pointer outside."""
        self.page.mouse.move(0, 0)
        self.page.evaluate(
            """() => {
              document.getElementById("keys").close();
              document.getElementById("search").value = "";
              document.activeElement.blur();
              if (!Explorer.whole) return;
              Explorer.data = Explorer.whole;
              Explorer.shown = null;
            }"""
        )
        self.problems.clear()
        self.go(view="pipeline")

    def go(self, **place: object) -> None:
        self.page.evaluate(_GO, {key: str(value) for key, value in place.items()})

    @property
    def place(self) -> dict[str, str]:
        """The parts of the address after the mark."""
        parameters: dict[str, str] = self.page.evaluate(
            "() => Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
        )
        return parameters

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element, as it is seen."""
        texts: list[str] = self.page.eval_on_selector_all(selector, _TEXTS)
        return texts

    def text(self, selector: str) -> str:
        [text] = self.texts(selector)
        return text

    def rows(self, selector: str) -> list[list[str]]:
        """Return the cells of each row of a table."""
        rows: list[list[str]] = self.page.eval_on_selector_all(f"{selector} tr", _CELLS)
        return rows

    def click(self, selector: str, text: str | None = None, first: bool = False) -> None:
        """Click the only element, or the first, with a selector and with this text if given."""
        elements = self.page.locator(selector)
        if text is not None:
            elements = elements.get_by_text(text, exact=True)
        if first:
            elements = elements.first
        assert elements.count() == 1, f"{elements.count()} elements match {selector} {text or ''}"
        elements.click(timeout=3000)

    def unfold(self, selector: str) -> None:
        """Open all details with a selector."""
        self.page.eval_on_selector_all(
            selector, "(all) => all.forEach(one => { one.open = true; })"
        )

    def under(self, heading: str) -> list[str]:
        """Return the texts in the details from a heading to the next."""
        texts: list[str] = self.page.evaluate(
            """heading => {
              const start = [...document.querySelectorAll("#details h3")]
                .find(one => one.textContent.startsWith(heading));
              const texts = [];
              let one = start?.nextElementSibling;
              for (; one && one.tagName !== "H3"; one = one.nextElementSibling)
                texts.push(one.innerText.trim());
              return texts;
            }""",
            heading,
        )
        return texts

    def remove(self, script: str) -> None:
        """Leave a part of the data out: a script that changes `data`."""
        self.page.evaluate(
            f"""() => {{
              Explorer.whole = Explorer.whole || Explorer.data;
              Explorer.data = structuredClone(Explorer.whole);
              Explorer.shown = null;
              ({script})(Explorer.data);
            }}"""
        )

    def check_quiet(self) -> None:
        assert self.problems == []
        assert self.page.evaluate("() => window.hacked") is None


def fails(check: Callable[[], None]) -> bool:
    """Return whether a check fails."""
    from playwright.sync_api import Error

    try:
        check()
    except (AssertionError, Error, ValueError, KeyError, IndexError):
        return True
    return False


def watch(page: Any) -> Reader:
    """Return a reader of a page that notes everything that a page must not do."""
    reader = Reader(page)

    def asked(request: Any) -> None:
        if not request.url.startswith(("file://", "data:", "blob:")):
            reader.problems.append(f"request of {request.url}")

    def dialog(shown: Any) -> None:
        reader.problems.append(f"dialog: {shown.message}")
        shown.dismiss()

    page.on("request", asked)
    page.on("dialog", dialog)
    page.on("console", lambda message: reader.problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: reader.problems.append(f"error: {error}"))
    return reader
