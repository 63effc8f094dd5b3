"""The use of an explorer page in Chromium: opening it, choosing passes, and the timeline."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.explorer import Used

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

_READY = """() => new Promise(done => {
  const seen = () => done(performance.now());
  if (document.body.dataset.ready) return seen();
  new MutationObserver(seen).observe(document.body, { attributeFilter: ["data-ready"] });
})"""
"""The ms from the start of the navigation until the page has its first view."""

_CHOOSE = """name => new Promise(done => {
  const button = [...document.querySelectorAll("button.pass")]
    .find(one => one.querySelector("b").textContent === name);
  const started = performance.now();
  button.click();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - started)));
})"""
"""The ms from a click until the frame after the one that shows the changed page has begun."""

_SCHEDULE = """() => new Promise(done => {
  const started = performance.now();
  const seen = () => done(performance.now() - started);
  new MutationObserver(seen).observe(document.body, { attributeFilter: ["data-schedule"] });
  document.querySelector('#tabs [data-view="schedule"]').click();
})"""

_TOTALS = """() => {
  const { levels, totals, rawTotals } = Explorer.timeline;
  return { raw: rawTotals(), levels: levels().map((_, number) => totals(number)) };
}"""


def use_page(path: Path, frames: int) -> Used:
    """Open a page in a new browser, and use it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_browser(), args=ARGUMENTS)
        try:
            return use_in(browser, path, frames)
        finally:
            browser.close()


def use_in(browser: Any, path: Path, frames: int) -> Used:
    """Open a page, choose every pass, and move through the timeline."""
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(120_000)
    page.goto(f"{path.as_uri()}#view=pipeline", wait_until="commit")
    view = page.evaluate(_READY)
    choices = _choices(page)
    schedule = page.evaluate(_SCHEDULE)
    totals = page.evaluate(_TOTALS)
    script = page.evaluate("frames => Explorer.timeline.script(frames)", frames)
    page.close()
    equal = bool(totals["levels"]) and all(level == totals["raw"] for level in totals["levels"])
    return Used(view / 1e3, schedule / 1e3, choices, script["between"], script["drawing"], equal)


def _choices(page: Any) -> dict[str, float]:
    """Choose each pass of the first pipeline; return the ms of each."""
    page.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true; })")
    names = page.eval_on_selector_all("button.pass b", "all => all.map(one => one.textContent)")
    return {name: page.evaluate(_CHOOSE, name) for name in names}


def _browser() -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"This benchmark needs a browser: none of {', '.join(BROWSERS)} is installed.")
    return browser
