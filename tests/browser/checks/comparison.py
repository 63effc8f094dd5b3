"""The Compare view: the error of each value."""

from __future__ import annotations

from typing import Any

from torch import fx

from tests.browser.reader import Reader
from tests.browser.subject import Truth
from tpcompile.exploring import Exploration


def comparison(reader: Reader, truth: Truth, exploration: Exploration) -> None:
    """Read where the error in bf16 grows most, and the worst value of each layer."""
    reader.go(view="compare")
    assert reader.texts("#view h2") == [
        "prompts, tp=4, float32: equal within rounding",
        "prompts, tp=4, bfloat16: equal within rounding",
    ]
    growth, worst = reader.page.eval_on_selector_all(
        "#view table",
        "(all) => all.slice(-2).map(t => [...t.rows].map(r => [...r.cells].map(c => c.innerText)))",
    )
    rows = [row for row in exploration.comparisons[1]["rows"] if row["error"] is not None]
    wanted = sorted(rows, key=lambda row: _growth(row, rows, truth), reverse=True)
    shown = [row[0] for row in growth[1:]]
    assert shown == [f"%{row['node']}" for row in wanted[:8]]
    assert growth[1][4] == _exponent(_growth(wanted[0], rows, truth))
    by_layer: dict[Any, dict[str, Any]] = {}
    for row in rows:
        last = by_layer.get(row["layer"])
        if last is None or row["error"] / row["limit"] > last["error"] / last["limit"]:
            by_layer[row["layer"]] = row
    assert {row[0]: row[1] for row in worst[1:]} == {
        "outside" if layer is None else str(layer): f"%{row['node']}"
        for layer, row in by_layer.items()
    }
    assert len(reader.texts("svg.plot")) == 2
    most = wanted[0]
    reader.click("#view table a", f"%{most['node']}", first=True)
    [told] = [row for row in reader.rows("#details table") if row[:1] == ["bfloat16"]]
    assert told == ["bfloat16", _exponent(most["error"]), _exponent(most["limit"])]


def _growth(row: dict[str, Any], rows: list[dict[str, Any]], truth: Truth) -> float:
    errors = {entry["node"]: entry["error"] for entry in rows}
    node = truth.nodes.get(row["node"])
    before = (
        max((_nearest(operand, errors) for operand in node.all_input_nodes), default=0.0)
        if node
        else 0.0
    )
    growth: float = row["error"] - before
    return growth


def _nearest(node: fx.Node, errors: dict[str, float]) -> float:
    """Return the error of a value, or the largest one of those that it is computed from."""
    if node.name in errors:
        return errors[node.name]
    return max((_nearest(operand, errors) for operand in node.all_input_nodes), default=0.0)


def _exponent(value: float) -> str:
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits}e{int(power):+d}"
