"""Each view says what the compiler did, and no check passes with the data of its view left out."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest

from tests.browser.checks import CHECKS
from tests.browser.reader import Reader, fails
from tests.browser.subject import Truth
from tpcompile.exploring import Exploration


def run(name: str, reader: Reader, truth: Truth, exploration: Exploration) -> None:
    arguments: dict[str, Any] = {"reader": reader, "truth": truth, "exploration": exploration}
    check = CHECKS[name]
    check(**{key: arguments[key] for key in inspect.signature(check).parameters})


@pytest.mark.parametrize("name", CHECKS)
def test_a_reader_finds(name: str, reader: Reader, truth: Truth, exploration: Exploration) -> None:
    run(name, reader, truth, exploration)


def _of(rows: str, key: str) -> str:
    return f"data => {{ for (const one of {rows}) delete one.{key}; }}"


_LINES = "data.recordings.flatMap(one => one.lines)"
_STAGES = "data.recordings.flatMap(one => one.stages)"
LEFT_OUT = {
    "about": ("data => { data.about = {}; }", ["overview"]),
    "text": (_of(_LINES, "text"), ["diff", "line"]),
    "name": (_of(_LINES, "name"), ["diff", "drawing", "readers"]),
    "op": (_of(_LINES, "op"), ["drawing", "rule"]),
    "operands": (_of(_LINES, "operands"), ["readers", "drawing", "rule", "comparison"]),
    "place": (_of(_LINES, "place"), ["placement", "drawing", "rule"]),
    "origin": (_of(_LINES, "origin"), ["source", "lighting"]),
    "parameter": (_of(_LINES, "parameter"), ["recipe"]),
    "needs": ("data => { for (const one of " + _STAGES + ") one.needs = {}; }", ["needs"]),
    "rule": (_of(_LINES, "rule"), ["rule"]),
    "cost": (_of(_LINES, "cost"), ["cost"]),
    "expressions": (
        "data => { for (const one of " + _LINES + ") one.expressions = []; }",
        ["expression"],
    ),
    "changes": ("data => { for (const one of " + _STAGES + ") one.changes = {}; }", ["proof"]),
    "fates": (
        "data => { for (const one of " + _STAGES + ") one.fates = {}; }",
        ["fates", "history", "collectives"],
    ),
    "sections": (_of(_STAGES, "sections"), ["diff", "line", "drawing"]),
    "matches": (_of(_STAGES, "matches"), ["passes"]),
    "nodes": (_of(_STAGES, "nodes"), ["passes"]),
    "ms": (_of(_STAGES, "ms"), ["passes"]),
    "check_ms": (_of(_STAGES, "check_ms"), ["passes"]),
    "bodies": (_of("data.recordings", "bodies"), ["diff", "line"]),
    "plan": (
        "data => { for (const one of data.compilations) one.plan = null; }",
        ["shares", "history"],
    ),
    "axes": ("data => { for (const one of data.compilations) one.axes = []; }", ["heads"]),
    "modules": (_of("data.compilations", "modules"), ["module"]),
    "compilations": ("data => { data.compilations.length = 1; }", ["beside"]),
    "sources": ("data => { data.sources = {}; }", ["source", "lighting"]),
    "comparisons": ("data => { data.comparisons = []; }", ["comparison"]),
    "errors": (
        "data => { for (const one of data.comparisons[1].rows) one.error = null; }",
        ["comparison"],
    ),
}
"""For each part of the data: a script that leaves it out, and the checks that must then fail."""


@pytest.mark.parametrize("part", LEFT_OUT)
def test_no_check_passes_without_its_data(
    part: str, opened: Reader, truth: Truth, exploration: Exploration
) -> None:
    script, checks = LEFT_OUT[part]
    for name in checks:
        opened.reset()
        opened.remove(script)
        check = partial(run, name, opened, truth, exploration)
        assert fails(check), f"{name} passes without {part}"
    opened.reset()
    opened.problems.clear()


def test_every_check_can_fail() -> None:
    assert set(CHECKS) == {name for _, checks in LEFT_OUT.values() for name in checks}


def test_a_pass_that_is_not_proved(opened: Reader) -> None:
    opened.reset()
    reason = "it declares no rewrites"
    opened.remove(f"data => {{ data.recordings[0].stages[3].unproved = '{reason}'; }}")
    opened.go(view="pipeline", c=0, node="l0_q_proj", **{"pass": "raise-attention"})
    texts = [text.replace("\xa0", " ") for text in opened.texts(".passes .pass")]
    told = [text for text in texts if "not proved" in text]
    assert [text.split("\n")[0] for text in told] == ["raise-norm"]
    assert "Not proved: raise-norm." in opened.under("Why")
    opened.go(view="pipeline", c=0, node="l0_input_normed", **{"pass": "raise-norm"})
    assert f"not proved: {reason}." in opened.texts("#details ol.history li")[-1]
    opened.reset()
