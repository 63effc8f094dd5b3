"""Options, fixtures for goldens and shared processes, and torch settings."""

from __future__ import annotations

import difflib
import fcntl
import gc
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.thinned import left_out
from tpcompile.cores import cores

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure() -> None:
    """Restore Ctrl-C, which background jobs and their children otherwise ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return one and a half processes for each core: many tests wait for other processes."""
    return 3 * cores() // 2


def pytest_unconfigure() -> None:
    launches = sys.modules.get("tests.launches")
    if launches is not None:
        launches.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write goldens, do not compare")
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not config.getoption("--slow"):
        reasons["slow"] = "takes minutes; run with --slow"
        for item in left_out(items):
            item.add_marker(pytest.mark.skip(reason="one of many cases; run with --slow"))
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a GPU, and torch finds none"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Let collections of garbage leave out what imports have made, as it stays to the end.

    They are also rarer than by default, where they take a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many browser tests did not run, and why."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", ())
        if report.nodeid.startswith("tests/browser/")
    ]
    for reason, count in Counter(_reason(report) for report in skipped).items():
        terminalreporter.write_line(f"{count} browser tests did not run: {reason}", yellow=True)


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread: on small tensors, more threads only add synchronisation."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def captured_once() -> Iterator[None]:
    """Capture each model once per session, for tests whose subject is not capture."""
    from tests.captures import share_captures

    with pytest.MonkeyPatch.context() as patch:
        share_captures(patch)
        yield


@pytest.fixture(scope="module")
def verified_once() -> Iterator[None]:
    """Verify each program once, for tests that run the same program in several executors."""
    from tests.verified import share_verdicts

    with pytest.MonkeyPatch.context() as patch:
        share_verdicts(patch)
        yield


@pytest.fixture(scope="module")
def forked_launchers() -> Iterator[None]:
    """Fork launchers from a process that has imported torch, unless starting is the subject."""
    from tests import launches
    from tpcompile.runtime.ranks import launcher

    launches.ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "start_process", launches.start_forked)
        yield


@pytest.fixture(scope="module")
def forked_sides() -> Iterator[None]:
    """Fork the sides of benchmarks in the same way."""
    from benchmarks.peers import side
    from tests import launches, scripts

    launches.ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side, "start_process", scripts.start_side)
        yield


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Return a function that makes a file or directory once for all processes of pytest-xdist.

    It takes a name, and a function that writes to a path. Do not change what was made.
    """
    temporary = tmp_path_factory.getbasetemp()
    shared = temporary.parent if hasattr(request.config, "workerinput") else temporary

    def make(name: str, write: Callable[[Path], object]) -> Path:
        path = shared / name
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = shared / f"{name}.unfinished"
                write(unfinished)
                unfinished.rename(path)
        return path

    return make


@pytest.fixture(scope="session")
def tools_demo(made_once: MadeOnce) -> Path:
    """Train the demo model with tools, which takes a minute."""
    from tpcompile.demo import make_demo

    return made_once("tools-demo", partial(make_demo, tools=True))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Provide `golden(name, text)`, which asserts that the text equals tests/golden/NAME."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"{path} is missing; run pytest --update-golden and read it"
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), "golden", "now", lineterm=""
            )
            pytest.fail(f"{name} differs from its golden:\n" + "\n".join(diff), pytrace=False)

    return compare
