"""Lines: filled with the number of a layer, a template is the line of that layer, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.inspect.explorer.recorded import MODELS, Recorded, filled, recorded, unfolded
from tests.ir.byte_ranges import byte_ranges
from tpcompile.inspect.explorer.lines import Lines, generalised
from tpcompile.inspect.explorer.stages import StageRecorder
from tpcompile.ir.meta import origin_of, parameter_of, type_of
from tpcompile.ir.ops import spec_of
from tpcompile.ir.pieces import merge
from tpcompile.ir.types import Shard, ValueType
from tpcompile.passes import decode_pipeline, run_passes
from tpcompile.presets import preset
from tpcompile.rewriting.proving import Prover


@pytest.mark.parametrize("model", MODELS)
def test_folded_stages_are_the_stages(model: str) -> None:
    recording = recorded(model)
    assert len(recording.recorder.stages) == len(recording.seen.graphs)
    for number, graph in enumerate(recording.seen.graphs):
        assert unfolded(recording.recorder, number) == [(n.section, n.line) for n in graph.values()]


@pytest.mark.parametrize("model", MODELS)
def test_names_and_operands_are_those_of_the_nodes(model: str) -> None:
    recording = recorded(model)
    for number, graph in enumerate(recording.seen.graphs):
        names = unfolded(recording.recorder, number, lambda row: row["name"])
        assert [name for _, name in names] == [node.name for node in graph.values()]
        operands = unfolded(recording.recorder, number, lambda row: " ".join(row["operands"]))
        assert [names for _, names in operands] == [" ".join(n.operands) for n in graph.values()]


@pytest.mark.parametrize("model", MODELS)
def test_the_page_can_read_the_layer_from_a_name(model: str) -> None:
    """Names of values in layers, and no others, begin with the number of the layer."""
    for graph in recorded(model).seen.graphs:
        for node in graph.values():
            start, _, suffix = node.name.partition("_")
            numbered = bool(suffix) and start[:1] == "l" and start[1:].isdigit()
            assert numbered == (node.layer is not None), node.name
            assert not numbered or int(start[1:]) == node.layer


def layers_of(recorder: StageRecorder, stage: int) -> list[list[int]]:
    """Return the first and the last layer of each section of layers."""
    return [
        section[1:3] for section in recorder.stages[stage]["sections"] if section[1] is not None
    ]


def test_equal_layers_are_one_section() -> None:
    recorder = recorded("qwen3 tp=4").recorder
    sections = {str(layers_of(recorder, stage)) for stage in range(len(recorder.stages))}
    # The first layer reads the embedding, whose norm fuse-add-norm leaves alone, so that the second
    # layer reads the residual of the first under another name. select-rows changes the last layer.
    assert sections == {
        "[[0, 0], [1, 3]]",
        "[[0, 0], [1, 1], [2, 3]]",
        "[[0, 0], [1, 1], [2, 2], [3, 3]]",
    }
    assert layers_of(recorder, -1) == [[0, 0], [1, 3]]


def test_layers_with_windows_are_sections_of_their_own() -> None:
    assert layers_of(recorded("windows tp=2").recorder, -1) == [[0, 0], [1, 1], [2, 4]]
    assert layers_of(recorded("windows at first").recorder, -1) == [[0, 0], [1, 1], [2, 4]]


def test_more_equal_layers_cost_no_rows() -> None:
    few, many = (_rows_with(layers) for layers in (3, 6))
    assert len(few) == len(many) > 100


def _rows_with(layers: int) -> list[str]:
    values = {**preset("tiny-qwen3"), "num_hidden_layers": layers}
    prover = Prover()
    recorder = StageRecorder(prover)
    captured = captured_once(AutoConfig.for_model(**values)).graph
    run_passes(captured, decode_pipeline(2), [recorder], prover=prover)
    return [row["text"] for row in recorder.lines.rows]


@pytest.mark.parametrize("model", ["qwen3 tp=4", "qwen2 tp=3", "qwen3 tp=1"])
def test_details_are_those_of_the_nodes(model: str) -> None:
    recording = recorded(model)
    for gm in (recording.prompt, recording.step):
        for node, row, _ in _rows(recording, gm):
            kind = node.meta.get("type")
            if isinstance(kind, ValueType):
                _check_type(kind, row, recording.tp)
            if "cost" in row:
                _check_cost(node, row, recording.tp)


def _check_type(kind: ValueType, row: dict[str, Any], ranks: int) -> None:
    local = [list(kind.local_shape(rank)) for rank in range(ranks)]
    assert row["place"]["kind"] == type(kind.placement).__name__
    assert row["place"]["text"] == str(kind.placement)
    if isinstance(kind.placement, Shard) and "parts" in row["place"]:
        assert row["place"]["dim"] == kind.placement.dim
        held = [sum(stop - start for start, stop in runs) for runs in row["place"]["parts"]]
        assert held == [shape[kind.placement.dim] for shape in local]


def _check_cost(node: fx.Node, row: dict[str, Any], ranks: int) -> None:
    spec = spec_of(node)
    assert spec is not None
    operands: Any = [type_of(other) for other in node.all_input_nodes]
    for rank in range(ranks):
        cost = spec.cost(type_of(node), operands, rank)
        sent = cost.wire_bytes * (ranks - 1) // ranks  # a rank sends all parts but one
        wanted = [cost.flops, cost.memory_bytes, sent]
        assert _of_rank(row["cost"], rank) == wanted


def _of_rank(values: list[Any], rank: int) -> Any:
    """Return the value of a rank; one value stands for those of all ranks."""
    return values[rank] if len(values) > 1 else values[0]


@pytest.mark.parametrize("model", ["qwen3 tp=4", "qwen2 tp=3"])
def test_bytes_are_those_that_ranks_read(model: str) -> None:
    recording = recorded(model)
    checked = 0
    for gm in (recording.prompt, recording.step):
        for node, row, layer in _rows(recording, gm):
            if node.op != "get_attr":
                assert "parameter" not in row
                continue
            parameter = parameter_of(node)
            ranks = row["parameter"]["ranks"]
            for rank in range(recording.tp):
                ranges: dict[str, list[tuple[int, int]]] = {}
                for read in _of_rank(ranks, rank)["reads"]:
                    starts = (read["start"] + n * read["stride"] for n in range(read["count"]))
                    runs = [(start, start + read["bytes"]) for start in starts]
                    ranges.setdefault(filled(read["tensor"], layer), []).extend(runs)
                wanted = byte_ranges(parameter.shards[rank], parameter.type.dtype.itemsize)
                assert {name: merge(runs) for name, runs in ranges.items()} == wanted, node.name
                checked += 1
    assert checked > 40


def _rows(
    recording: Recorded, gm: fx.GraphModule
) -> list[tuple[fx.Node, dict[str, Any], int | None]]:
    """Return each node of a graph with its row, and the layer that fills it."""
    lines = recording.recorder.lines
    return [
        (
            node,
            lines.rows[lines.number_of(node, recording.tp)],
            None if node.op in ("placeholder", "output") else origin_of(node).layer,
        )
        for node in gm.graph.nodes
    ]


@pytest.mark.parametrize(
    ("text", "layer", "template"),
    [
        ("%l1_q = f(%l0_x, %l11_y)", 1, "%l\x01_q = f(%l\x02_x, %l11_y)"),
        ("model.layers.1.mlp modeling.py:1", 1, "model.layers.\x01.mlp modeling.py:1"),
        (
            "model.layers.12.a ++ model.layers.11.b",
            12,
            "model.layers.\x01.a ++ model.layers.\x02.b",
        ),
        ("f32[2, 1] Shard(1, q) cache(layer=1)", 1, "f32[2, 1] Shard(1, q) cache(layer=\x01)"),
        ("scale(%l1_x, 0.1, 1)", 1, "scale(%l\x01_x, 0.1, 1)"),
        ("model.layers.0.mlp %l0_a %lm_head", 0, "model.layers.\x01.mlp %l\x01_a %lm_head"),
        ("%l1_q", None, "%l1_q"),
    ],
)
def test_templates(text: str, layer: int | None, template: str) -> None:
    assert generalised(layer)(text).replace("0.\x01,", "0.1,") == template
    assert filled(generalised(layer)(text), layer) == text


def test_a_changed_node_gets_another_line() -> None:
    """A line is kept only while the node, its type and the names of its operands stay the same."""
    recording = recorded("qwen3 tp=1")
    graph = fx.Graph()
    copied = {}
    for node in recording.prompt.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    lines = Lines()
    add = next(n for n in graph.nodes if n.name == "l0_q_normed")
    first = lines.number_of(add, 1)
    assert lines.number_of(add, 1) == first
    operand = add.all_input_nodes[0]
    operand.name = "renamed"
    assert "%renamed" in lines.rows[lines.number_of(add, 1)]["text"]
    add.replace_input_with(operand, next(n for n in graph.nodes if n.name == "l0_k"))
    assert "%l\x01_k" in lines.rows[lines.number_of(add, 1)]["text"]
    add.meta["type"] = type_of(next(n for n in graph.nodes if n.name == "embedding"))
    assert lines.number_of(add, 1) not in (first, first + 1, first + 2)
