"""Tests of the drawing of a graph."""

from __future__ import annotations

import re

import pytest
from torch import fx

from tests.inspect.stages import captured, graph
from tpcompile.inspect.dot import graph_dot
from tpcompile.ir.meta import origin_of, value_type
from tpcompile.ir.ops import ALL_REDUCE_RESIDUAL, COLLECTIVES
from tpcompile.ir.types import Partial, Shard, ValueType

_STRING = r'"(?:[^"\\]|\\.)*"'
_VALUE = rf"(?:{_STRING}|[\w.]+)"
_ATTRIBUTES = rf"\[\w+={_VALUE}(?:, \w+={_VALUE})*\]"
_STATEMENTS = (
    rf"digraph {_STRING} \{{",
    r"subgraph cluster_layer_\d+ \{",
    r"\}",
    rf"(?:\w+={_VALUE}; ?)+",
    rf"(?:node|edge) {_ATTRIBUTES};",
    rf"{_STRING} {_ATTRIBUTES};",
    rf"{_STRING} -> {_STRING};",
)


@pytest.mark.parametrize("rank", [None, 1])
def test_every_line_is_graphviz(rank: int | None) -> None:
    for gm in (captured(), graph(4), graph(4, "decode")):
        lines = graph_dot(gm, None if gm is captured() else rank).splitlines()
        for line in lines:
            assert any(re.fullmatch(s, line.strip()) for s in _STATEMENTS), line
        assert sum(line.endswith("{") for line in lines) == sum(
            line.strip() == "}" for line in lines
        )


def drawn(gm: fx.GraphModule, rank: int | None = None) -> dict[str, str]:
    """Return the attributes of each node by name."""
    nodes = re.findall(r'^ +"(\w+)" (\[.*\]);$', graph_dot(gm, rank), re.MULTILINE)
    return dict(nodes)


def test_nodes_and_edges_are_those_of_the_graph() -> None:
    gm = graph(4)
    assert set(drawn(gm)) == {node.name for node in gm.graph.nodes}
    edges = re.findall(r'"(\w+)" -> "(\w+)";', graph_dot(gm))
    assert sorted(edges) == sorted(
        (source.name, node.name) for node in gm.graph.nodes for source in node.all_input_nodes
    )


@pytest.mark.parametrize("pipeline", ["", "decode"])
def test_colours_and_shapes(pipeline: str) -> None:
    gm = graph(4, pipeline)
    attributes = drawn(gm)
    for node in gm.graph.nodes:
        text = attributes[node.name]
        crosses = node.target in (*COLLECTIVES, ALL_REDUCE_RESIDUAL)
        assert ("doubleoctagon" in text) == crosses
        if isinstance(node.meta.get("type"), ValueType):
            placement = value_type(node).placement
            assert ("fillcolor=lightskyblue" in text) == isinstance(placement, Shard)
            assert ("fillcolor=orange" in text) == isinstance(placement, Partial)


def test_layers_are_clusters() -> None:
    gm = graph(4)
    text = graph_dot(gm)
    for layer in (0, 1):
        cluster = text.partition(f"cluster_layer_{layer} {{")[2].partition("\n  }")[0]
        inside = set(re.findall(r'^    "(\w+)" \[', cluster, re.MULTILINE))
        assert inside == {n.name for n in gm.graph.nodes if origin_of(n).layer == layer}


def test_one_rank_shows_its_shapes() -> None:
    text = graph_dot(graph(4), 3)
    assert 'label="qwen3 (rank 3 of 4)\\n' in text
    assert "[T, 1, 16]" in drawn(graph(4), 3)["l0_attention"]
    assert "[T, 6:2|2|1|1, 16]" in drawn(graph(4))["l0_attention"]
