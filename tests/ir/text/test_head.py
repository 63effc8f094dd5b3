"""The header is read back as it is written, and wrong headers are refused."""

from __future__ import annotations

import json

import pytest

from tpcompile.errors import UsageError
from tpcompile.ir.info import GraphInfo, RotarySource
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.plan import HeadPlan, Plan
from tpcompile.ir.text.head import MOST_RANKS, Head
from tpcompile.ir.text.header import header_lines, names_of_layouts
from tpcompile.ir.text.scanner import Scanner

HEADS = Layout("q_heads", 3, 1, even_runs(3, 2))
KEYS = Layout("kv_heads", 1, 1, (((0, 1),), ((0, 1),)))
FFN, WIDE, VOCAB = (
    Layout("ffn", 8, 1, even_runs(8, 2)),
    Layout("ffn", 10, 1, even_runs(10, 2)),
    Layout("vocab", 9, 1, even_runs(9, 2)),
)


def info() -> GraphInfo:
    heads = {f"l{layer}_attention": HeadPlan(HEADS, KEYS) for layer in range(3)}
    plan = Plan(2, heads, {"l0_mlp": FFN, "l1_mlp": FFN, "l2_mlp": WIDE}, VOCAB)
    graph_info = GraphInfo('a "small"\ngraph', 2, outputs=(), plan=plan, model="Qwen3\tForCausalLM")
    graph_info.rotary = RotarySource("transformers.x.Rotary", json.dumps({"a": "<é>", "b": [1]}))
    graph_info.biases = frozenset(
        {
            *((f"l.{layer}.q.bias", f"l.{layer}.q.weight") for layer in range(12)),
            ("odd", "l.0.q.weight"),
            ("a b.bias", "a b.weight"),
        }
    )
    return graph_info


def written(of: GraphInfo) -> list[str]:
    return list(header_lines(of, names_of_layouts(of, [])))


def parsed(lines: list[str]) -> Head:
    return Head.read([Scanner(number, line) for number, line in enumerate(lines, 1)])


def test_both_ways() -> None:
    lines = written(info())
    assert all(line.isprintable() for line in lines)
    assert "  l.{0..11}.q.bias" in lines and "  odd of l.0.q.weight" in lines
    header = parsed([*lines, "%x = input"])
    assert header.info == info() and header.count == len(lines)
    assert written(header.info) == lines
    assert list(header.layouts) == ["q_heads", "kv_heads", "ffn", "ffn#2", "vocab"]


def test_a_graph_without_a_plan() -> None:
    lines = written(GraphInfo("x", 1, outputs=()))
    assert parsed(lines).info == GraphInfo("x", 1, outputs=())


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("graph ", "digraph x", "not the text of a graph"),
        ("graph ", "graph x (rank 1 of 2)", "text of one rank cannot be parsed"),
        ("graph ", "graph x (layer 3)", "text of one layer cannot be parsed"),
        ("graph ", "graph x (tp=0)", f"from 1 to {MOST_RANKS}"),
        ("graph ", "graph x (tp=100000)", f"from 1 to {MOST_RANKS}"),
        ("rotary ", "rotary a.b [1]", "configuration is not valid"),
        ("rotary ", "rotary a.b " + "[" * 100_000, "configuration is not valid"),
        ("  q_heads =", "  q_heads = 0: 0-1", "from 1 to"),
        ("  q_heads =", "  q_heads = 3: 0-2 | 2-4", "not inside of the 3 units"),
        ("  q_heads =", "  q_heads = 3: 0-0 | 0-3", "not inside of the 3 units"),
        ("  kv_heads =", "  q_heads = 3: 0-2 | 2-3", "defined twice"),
        ("  vocab", "  vocabulary", "no layout vocabulary"),
        ("  q_heads kv", "  q_heads kv_heads : %l{0..}_attention", "not valid"),
        ("  q_heads kv", "  q_heads+kv_heads : %x", "no fused layouts"),
        ("  odd", "  odd of", "unexpected text"),
    ],
)
def test_wrong_headers_are_refused(line: str, instead: str, message: str) -> None:
    lines = written(info())
    place = max(number for number, candidate in enumerate(lines) if candidate.startswith(line))
    lines[place] = instead
    with pytest.raises(UsageError, match=message) as error:
        parsed(lines)
    assert error.value.where.startswith(f"line {place + 1}, column ")


def test_an_empty_text() -> None:
    with pytest.raises(UsageError, match="is empty"):
        parsed([])
