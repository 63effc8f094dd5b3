"""The Schedule view says what the program of the decode step is, and nothing without its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.checks.schedule import CHECKS, shown, table_under
from tests.browser.reader import Reader, fails, watch
from tests.browser.subject import TP, Truth
from tpcompile.exploring import Exploration, explore
from tpcompile.inspect.explorer.columns import pack_columns
from tpcompile.scheduling import choose
from tpcompile.vm.schedule.scheduled import Scheduled, scheduled

Columns = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def step(truth: Truth) -> Scheduled:
    choices = choose(tp=TP, target="cpu", workers=3)
    return scheduled(truth.step, choices.target, choices.plan, choices.policy)


@pytest.mark.parametrize("name", CHECKS)
def test_a_reader_finds(name: str, reader: Reader, step: Scheduled) -> None:
    CHECKS[name](reader, step)


def zeros(*names: str) -> Callable[[Columns], Columns]:
    """Return a function that fills the columns whose names begin so with zeros."""
    return lambda columns: {
        name: np.zeros_like(column) if name.startswith(names) else column
        for name, column in columns.items()
    }


def empty(lengths: str, *elements: str) -> Callable[[Columns], Columns]:
    """Return a function that empties the sequences of all instructions."""
    return lambda columns: zeros(lengths)(columns) | {name: columns[name][:0] for name in elements}


LEFT_OUT: dict[str, tuple[Callable[[Columns], Columns], list[str]]] = {
    "kinds": (zeros("group_kind"), ["kinds", "totals", "critical_path", "idle"]),
    "finishes": (zeros("finish"), ["figures", "totals"]),
    "starts": (zeros("start"), ["idle", "longest_waits"]),
    "parts": (zeros("parts"), ["loads"]),
    "operands": (zeros("own_"), ["operands"]),
    "workers": (zeros("worker"), ["operands", "idle"]),
    "layers": (zeros("group_layer"), ["operands", "longest_waits"]),
    "reads": (zeros("reads"), ["accesses"]),
    "boxes": (zeros("access_box"), ["accesses"]),
    "waits": (empty("waits", "wait_counter", "wait_until"), ["waits", "signals"]),
    "signals": (empty("signals", "signal_counter"), ["signals", "waits"]),
    "releases": (zeros("released_by"), ["idle", "longest_waits"]),
    "critical path": (lambda columns: columns | {"chain": columns["chain"][:0]}, ["critical_path"]),
}
"""For each part of the data: a function that leaves it out, and checks that must then fail."""


def columns_of(index: dict[str, Any], blob: bytes) -> Columns:
    return {
        name: np.frombuffer(blob, np.dtype(dtype).newbyteorder("<"), count, offset)
        for name, (dtype, offset, count) in index.items()
    }


@pytest.mark.parametrize("part", LEFT_OUT)
def test_no_check_passes_without_its_data(
    part: str, browser: Any, exploration: Exploration, step: Scheduled, tmp_path: Path
) -> None:
    leave_out, checks = LEFT_OUT[part]
    assert exploration.schedule is not None
    data, blob = exploration.schedule
    index, blob = pack_columns(leave_out(columns_of(data["index"], blob)))
    path = tmp_path / "report.html"
    replace(exploration, schedule=(data | {"index": index}, blob)).write(path)
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(3_000)
    reader = watch(page)
    reader.open(path.as_uri())
    passed = [name for name in checks if not fails(partial(CHECKS[name], reader, step))]
    page.close()
    assert passed == [], f"passed without {part}"


def test_every_check_can_fail() -> None:
    assert set(CHECKS) == {name for _, checks in LEFT_OUT.values() for name in checks}


def test_a_measured_step(browser: Any, session_captures: None, tmp_path: Path) -> None:
    explored = explore("preset:tiny-qwen3", 1, target="cpu", workers=1, measured=True)
    explored.write(tmp_path / "report.html")
    page = browser.new_page()
    reader = watch(page)
    reader.open((tmp_path / "report.html").as_uri())
    shown(reader, step=1, instruction=0)
    predicted, measured = table_under(reader, "Time")[0][1:]
    assert (predicted, measured) == ("predicted", "measured, step 1")
    rows = table_under(reader, "Predicted and measured, step 1")
    assert explored.schedule is not None
    kinds = [kind["name"] for kind in explored.schedule[0]["kinds"]]
    assert [row[0] for row in rows[1:-1]] == kinds
    assert all(float(row[3].removesuffix(" µs").replace(",", "")) > 0 for row in rows[1:])
    reader.check_quiet()
    page.close()


@pytest.fixture
def schedule(reader: Reader) -> Reader:
    return shown(reader)


def test_a_theme_that_changes_while_another_view_is_shown(schedule: Reader) -> None:
    frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    corner = """() => [...document.querySelector("canvas.timeline").getContext("2d")
      .getImageData(2, 2, 1, 1).data]"""
    light = schedule.page.evaluate(corner)
    schedule.go(view="ranks")
    schedule.page.emulate_media(color_scheme="dark")
    schedule.page.evaluate(frames)
    schedule.check_quiet()
    schedule.go(view="schedule")
    schedule.page.evaluate(frames)
    schedule.page.evaluate(frames)
    assert schedule.page.evaluate(corner) != light
    schedule.page.emulate_media(color_scheme="light")
    # The browser advises how to read pixels, which only this test does.
    schedule.problems[:] = [text for text in schedule.problems if "getImageData" not in text]
