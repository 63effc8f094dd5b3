"""Pass tests as text: a graph before a pass, and the lines after it."""

from __future__ import annotations

from tpcompile.ir.checker import check_graph
from tpcompile.ir.parse import parse_graph
from tpcompile.ir.text import format_graph
from tpcompile.passes import Pass, Report


def graph_text(lines: str, result: str) -> str:
    """Return the text of a graph with one section `outside of the layers` on one rank.

    Lines that define inputs come first.
    """
    stripped = [line.strip() for line in lines.strip().splitlines()]
    inputs = [f"  {line}" for line in stripped if " = input" in line]
    body = [f"  {line}" for line in stripped if " = input" not in line]
    head = ["graph by-hand (tp=1)", "model Small", "inputs", *inputs, "outside of the layers"]
    return "\n".join([*head, *body, "result", f"  return {result}"]) + "\n"


def applied(current: Pass, text: str) -> tuple[Report, str]:
    """Run a pass on the text of a graph; return its report and the text after it."""
    gm = parse_graph(text)
    report = current.apply(gm)
    assert check_graph(gm) == []
    return report, format_graph(gm)


def assert_rewritten(current: Pass, before: str, after: str) -> None:
    """Assert that a pass rewrites a text once, to the text after it."""
    report, rewritten = applied(current, before)
    assert rewritten == after
    assert report.matches == 1


def assert_left_alone(current: Pass, text: str, reason: str) -> None:
    """Assert that a pass does not change a text, and says why not."""
    report, rewritten = applied(current, text)
    assert rewritten == text
    assert report.matches == 0
    assert reason in str(report.nearest)
