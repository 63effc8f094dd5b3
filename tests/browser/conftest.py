"""A browser for all tests, one page with a compilation, and the compilation itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.reader import Reader, watch
from tests.browser.subject import Truth, explored
from tpcompile.exploring import Exploration

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Start the browser of this machine.

    Its event loop runs as long as the browser, so tests of other packages could start none.
    """
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def exploration(browser: Any, session_captures: None) -> Exploration:
    """Collect the data of the page, if there is a browser to look at it."""
    return explored()


@pytest.fixture(scope="session")
def session_captures() -> Iterator[None]:
    """Share captures with the tests of this session."""
    from tests.captures import captured_once
    from tpcompile import exploring
    from tpcompile.compare import model, source

    with pytest.MonkeyPatch.context() as patch:
        for module in (exploring, model, source):
            patch.setattr(module, "capture", captured_once)
        yield


@pytest.fixture(scope="package")
def report(exploration: Exploration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "report.html"
    exploration.write(path)
    return path


@pytest.fixture(scope="session")
def truth(session_captures: None) -> Truth:
    return Truth()


@pytest.fixture(scope="package")
def opened(browser: Any, report: Path) -> Iterator[Reader]:
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(10_000)
    reader = watch(page)
    reader.open(report.as_uri())
    yield reader
    page.close()


@pytest.fixture
def reader(opened: Reader) -> Iterator[Reader]:
    """Provide the page at its start; afterwards it must have had no error and loaded nothing."""
    opened.reset()
    yield opened
    opened.check_quiet()
