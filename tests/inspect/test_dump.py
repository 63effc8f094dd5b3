"""Tests of the JSON form of a graph."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.inspect.stages import captured, graph
from tests.ir.byte_ranges import byte_ranges
from tpcompile.inspect.dump import graph_json, reads
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.pieces import merge, pieces
from tpcompile.ir.recipe import Permute, Recipe, Slice, Tensor


def nodes(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in data["nodes"]}


def test_every_stage_is_data() -> None:
    for gm in (captured(), graph(1), graph(4)):
        data = graph_json(gm)
        assert json.loads(json.dumps(data)) == data
        assert [node["name"] for node in data["nodes"]] == [n.name for n in gm.graph.nodes]


def test_operands_name_their_nodes() -> None:
    data = graph_json(graph(4))
    known = nodes(data)
    earlier: set[str] = set()
    for node in data["nodes"]:
        for operand in _flat(list(node["operands"].values())):
            if isinstance(operand, str) and operand.startswith("%"):
                assert operand[1:] in earlier
        earlier.add(node["name"])
    assert known["l0_attention"]["operands"] == {
        "q": "%l0_q_rotated",
        "k": "%l0_k_rotated",
        "v": "%l0_v",
        "cache": "%cache",
        "starts": "%starts",
        "slots": "%slots",
        "tables": "%tables",
        "lengths": "%lengths",
        "scale": 0.25,
        "window": None,
        "layer": 0,
        "block": 32,
    }
    assert known["output"]["operands"] == {"result": ["%lm_head_whole", "%tokens"]}
    assert known["cos"]["operands"] == {"value": "%rotary", "index": 0}


def _flat(values: list[Any]) -> list[Any]:
    return [v for item in values for v in (_flat(item) if isinstance(item, list) else [item])]


def test_types() -> None:
    known = nodes(graph_json(graph(4)))
    assert known["l0_attention"]["type"] == {
        "shape": ["T", 6, 16],
        "dtype": "f32",
        "placement": {
            "kind": "Shard",
            "dim": 1,
            "axis": "q_heads",
            "intervals": [[[0, 2]], [[2, 4]], [[4, 5]], [[5, 6]]],
        },
        "local_shapes": [["T", heads, 16] for heads in (2, 2, 1, 1)],
    }
    assert known["embedding"]["type"]["placement"] == {"kind": "Partial"}
    assert known["embedding_sum"]["type"]["placement"] == {"kind": "Replicate"}
    assert len(known["rotary"]["type"]) == 2
    raw = nodes(graph_json(captured()))
    assert {"symbol": "T"} in [node["type"] for node in raw.values()]


def test_origins() -> None:
    origin = nodes(graph_json(graph(4)))["l1_attention"]["origin"]
    assert (origin["module"], origin["layer"]) == ("model.layers.1.self_attn", 1)
    assert origin["file"] == "modeling_qwen3.py"
    assert origin["line"] > 0


def test_one_rank() -> None:
    every, last = graph_json(graph(4)), graph_json(graph(4), 3)
    assert last["ranks"] == [3]
    for whole, single in zip(every["parameters"], last["parameters"], strict=True):
        assert single["ranks"] == whole["ranks"][3:]
    attention = nodes(last)["l0_attention"]["type"]
    assert attention["local_shapes"] == [["T", 1, 16]]
    assert attention["placement"]["intervals"] == [[[5, 6]]]


def test_tokens_split_over_ranks_have_no_intervals() -> None:
    pipeline = (
        "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding,"
        "shard-linears,kv-heads,vocab-parallel,insert-collectives,sequence-parallel"
    )
    scattered = nodes(graph_json(graph(2, pipeline)))["embedding_sum"]["type"]
    assert scattered["placement"] == {"kind": "Shard", "dim": 0, "axis": "tokens"}
    assert scattered["local_shapes"] == [["T/2", 64], ["T/2", 64]]


def expanded(entries: list[dict[str, Any]]) -> dict[str, list[tuple[int, int]]]:
    """Return all byte ranges of each tensor."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for read in entries:
        starts = [read["start"] + i * read["stride"] for i in range(read["count"])]
        ranges.setdefault(read["tensor"], []).extend((s, s + read["bytes"]) for s in starts)
    return {name: merge(runs) for name, runs in ranges.items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 5])
def test_reads_are_the_byte_ranges_of_the_recipes(tp: int) -> None:
    gm = graph(tp)
    entries = {entry["node"]: entry for entry in graph_json(gm)["parameters"]}
    for node in parameters(gm.graph):
        for rank, recipe in enumerate(parameter_of(node).shards):
            shard = entries[node.name]["ranks"][rank]
            assert expanded(shard["reads"]) == byte_ranges(recipe, 4)
            size = sum(read["bytes"] * read["count"] for read in shard["reads"])
            rows, *columns = shard["shape"]
            assert size == 4 * rows * (columns[0] if columns else 1)


WEIGHT = Tensor("w", (8, 6))


@pytest.mark.parametrize(
    "recipe",
    [
        Permute(WEIGHT, 0, (2, 4), (1, 0)),
        Slice(Permute(WEIGHT, 0, (2, 4), (1, 0)), 1, 2, 5),
        Permute(Slice(WEIGHT, 0, 2, 6), 1, (3, 2), (1, 0)),
        Slice(Tensor("t", (3, 4, 5)), 1, 1, 3),
        Slice(Slice(Tensor("t", (3, 4, 5)), 2, 1, 3), 0, 1, 3),
    ],
)
def test_reads_of_other_recipes(recipe: Recipe) -> None:
    entries = [read for piece in pieces(recipe) for read in reads(piece, 2)]
    assert expanded(entries) == byte_ranges(recipe, 2)


def test_columns_are_one_entry_not_one_a_row() -> None:
    (piece,) = pieces(Slice(Tensor("w", (100, 40)), 1, 10, 20))
    assert reads(piece, 2) == [
        {"tensor": "w", "start": 20, "bytes": 20, "count": 100, "stride": 80}
    ]
