"""The Schedule view says what the program of the decode step is."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.browser.checks.texts import number
from tests.browser.reader import Reader
from tests.browser.subject import TP, Truth
from tpcompile.scheduling import choose
from tpcompile.vm.schedule.scheduled import Scheduled, scheduled


@pytest.fixture(scope="module")
def step(truth: Truth) -> Scheduled:
    choices = choose(tp=TP, target="cpu", workers=3)
    return scheduled(truth.step, choices.target, choices.plan, choices.policy)


@pytest.fixture
def schedule(reader: Reader) -> Reader:
    reader.go(view="schedule")
    reader.page.wait_for_selector("body[data-schedule]")
    return reader


def test_figures(schedule: Reader, step: Scheduled) -> None:
    count, queues = len(step.program.instructions), len(step.program.queues)
    words = schedule.text("p.figures")
    assert step.timing is not None
    workers = queues * step.program.sharing
    assert f"{count:,} instructions on {workers} workers of {TP} ranks" in words
    assert f"{step.timing.makespan:,.1f} µs predicted" in words
    assert "proved free of races and deadlocks" in words


def test_every_kind_is_counted(schedule: Reader, step: Scheduled) -> None:
    wanted = Counter(type(one).name for one in step.program.instructions)
    rows = schedule.page.eval_on_selector(
        ".tables table",
        "one => [...one.rows].slice(1).map(row => [...row.cells].map(c => c.innerText.trim()))",
    )
    found = {row[0]: number(row[1]) for row in rows if row[1]}
    assert found.pop("the step") == wanted.total()
    assert found == wanted


def test_totals_of_every_level_are_exact(schedule: Reader, step: Scheduled) -> None:
    assert step.timing is not None
    found = schedule.page.evaluate(
        """() => {
          const { levels, totals, rawTotals } = Explorer.timeline;
          return { raw: rawTotals(), levels: levels().map((_, number) => totals(number)) };
        }"""
    )
    wanted: Counter[str] = Counter()
    times = zip(step.program.instructions, step.timing.starts, step.timing.finishes, strict=True)
    for one, start, finish in times:
        wanted[type(one).name] += round(finish * 1000) - round(start * 1000)
    assert found["raw"] == wanted
    assert len(found["levels"]) > 1
    assert all(own == found["raw"] for own in found["levels"])


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
    schedule.problems[:] = [one for one in schedule.problems if "getImageData" not in one]
