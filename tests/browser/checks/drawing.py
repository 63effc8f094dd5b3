"""The Graph view: the drawing and the source beside it."""

from __future__ import annotations

from tests.browser.reader import Reader
from tests.browser.subject import Truth
from tpcompile.ir.meta import origin_of


def drawing(reader: Reader, truth: Truth) -> None:
    """Read the values of a drawing: a layer of each kind, with ops, placements and edges."""
    reader.go(view="graph", c=0, **{"pass": "insert-collectives"})
    graph = truth.graph_after("insert-collectives").graph
    shown = {
        node.name: node
        for node in graph.nodes
        if node.op not in ("get_attr", "output") and origin_of(node).layer in (None, 0, 1)
    }
    assert set(_drawn(reader)) == set(shown)
    words = reader.texts("svg.graph .node text")
    labels = dict(zip(words[::2], words[1::2], strict=True))
    assert "layers 1 to 2" in reader.texts("svg.graph > text")
    label = labels["%l0_o_proj_sum"]
    assert label == "tpc.all_reduce Replicate"
    assert labels["%l1_q_rotated"] == "tpc.rope Shard(1, q_heads)"
    edges = reader.page.eval_on_selector_all(
        "svg.graph .edge[data-from]", "(all) => all.map(one => [one.dataset.from, one.dataset.to])"
    )
    into = sorted(start for start, end in edges if end == "l1_swiglu")
    assert into == sorted(operand.name for operand in shown["l1_swiglu"].all_input_nodes)
    assert len(edges) == len({tuple(edge) for edge in edges}) > 60


def _drawn(reader: Reader) -> list[str]:
    names: list[str] = reader.page.eval_on_selector_all(
        "svg.graph .node", "(all) => all.map(one => one.dataset.name)"
    )
    return names


def lighting(reader: Reader, truth: Truth) -> None:
    """Point at a value, and see its line of the model; point at the line, and see its values."""
    graph = truth.graph_after("fuse-qkv").graph
    node = next(value for value in graph.nodes if value.name == "l0_swiglu")
    reader.go(view="graph", c=0, **{"pass": "fuse-qkv"})
    reader.page.evaluate(
        """name => document.querySelector(`svg [data-name="${name}"]`).focus()""", node.name
    )
    origin = origin_of(node)
    [lit] = reader.texts(".source .lit")
    assert lit.split()[0] == str(origin.line)
    key = origin_of(next(value for value in graph.nodes if value.name == "l0_o_proj")).place
    reader.page.evaluate(
        """key => document.querySelector(`.source [data-source="${key}"]`)
          .dispatchEvent(new MouseEvent("mouseenter"))""",
        key,
    )
    alike = {
        value.name
        for value in graph.nodes
        if value.op.startswith("call")
        and origin_of(value).place == key
        and origin_of(value).layer in (None, 0, 1)
    }
    assert set(_lit(reader)) == alike
    assert "l1_o_proj" in alike and node.name not in alike


def _lit(reader: Reader) -> list[str]:
    names: list[str] = reader.page.eval_on_selector_all(
        "svg.graph .node.lit", "(all) => all.map(one => one.dataset.name)"
    )
    return names
