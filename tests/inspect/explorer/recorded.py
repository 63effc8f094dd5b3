"""Recordings of small models for the tests, beside what their graphs were at each stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tpcompile.inspect.explorer.needs import needs_of
from tpcompile.inspect.explorer.stages import StageRecorder
from tpcompile.ir.meta import captured_value, made_of, origin_of
from tpcompile.ir.text.printer import format_node, section_of
from tpcompile.passes import Stats, decode_pipeline, default_pipeline, run_passes
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.presets import preset
from tpcompile.rewriting.proving import Prover

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3 tp=4": ("tiny-qwen3", 4, {"num_hidden_layers": 4}),
    "qwen2 tp=3": ("tiny-qwen2", 3, {}),
    "qwen3 tp=1": ("tiny-qwen3", 1, {}),
    "windows tp=2": ("tiny-qwen3", 2, {"num_hidden_layers": 5, **WINDOWS}),
    "windows at first": (
        "tiny-qwen3",
        2,
        {
            "num_hidden_layers": 5,
            **WINDOWS,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3,
        },
    ),
}
"""The preset, the number of ranks and changes of the configuration of each model."""


class Node(NamedTuple):
    """What is known of a node after a stage, read from the graph itself."""

    name: str
    layer: int | None
    section: str
    line: str
    operands: tuple[str, ...]
    meanings: frozenset[str]
    """The captured value, or the checkpoint tensors of a parameter."""
    users: tuple[fx.Node, ...]
    is_parameter: bool
    needs: tuple[dict[str, str], ...]


Graph = dict[fx.Node, Node]


@dataclass
class Snapshots:
    """An instrument that stores what is known of each node after each stage, in graph order."""

    names: list[str] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        self.names.append(name)
        self.graphs.append({node: _node(node) for node in gm.graph.nodes})


def _node(node: fx.Node) -> Node:
    inside = node.op not in ("placeholder", "output")
    if node.op == "get_attr":
        meanings = [tensor.name for tensor in made_of(node)]
    else:
        meanings = list(filter(None, [captured_value(node)]))
    return Node(
        node.name,
        origin_of(node).layer if inside else None,
        section_of(node),
        format_node(node),
        tuple(operand.name for operand in node.all_input_nodes),
        frozenset(meanings),
        tuple(node.users),
        node.op == "get_attr",
        tuple(needs_of(node)),
    )


@dataclass(frozen=True)
class Recorded:
    """The recording of a prompt pipeline and of the decode step that goes on from it."""

    recorder: StageRecorder
    seen: Snapshots
    shared: int
    """The last stage that both pipelines have."""
    prompt: fx.GraphModule
    step: fx.GraphModule

    @property
    def tp(self) -> int:
        tp: int = self.recorder.stages[-1]["tp"]
        return tp

    @property
    def prompt_stages(self) -> range:
        """The stages of the prompt pipeline; those of the decode step alone come after them."""
        return range(self.seen.names.index("keep-states") + 1)


@lru_cache
def graph_of(model: str) -> fx.GraphModule:
    """Return the captured graph of a model of the table."""
    name, _, changes = MODELS[model]
    return captured_once(AutoConfig.for_model(**{**preset(name), **changes})).graph


@lru_cache
def recorded(model: str) -> Recorded:
    """Record a model of the table."""
    tp = MODELS[model][1]
    passes = default_pipeline(tp)
    prover, snapshots, fork = Prover(), Snapshots(), DecodeFork(passes)
    recorder = StageRecorder(prover)
    prompt, _ = run_passes(graph_of(model), passes, [snapshots, recorder, fork], prover=prover)
    step_snapshots = Snapshots()
    prover = Prover(prover.expressions)
    step = fork.run(2, [step_snapshots, recorder.resumed(fork.shared, prover)], prover)
    snapshots.names += step_snapshots.names[1:]  # the first is the copy of the shared stage
    snapshots.graphs += step_snapshots.graphs[1:]
    return Recorded(recorder, snapshots, fork.shared, prompt, step)


@lru_cache
def whole_step(model: str) -> StageRecorder:
    """Record the decode pipeline of a model from its captured graph on."""
    prover = Prover()
    recorder = StageRecorder(prover)
    run_passes(graph_of(model), decode_pipeline(MODELS[model][1], 2), [recorder], prover=prover)
    return recorder


def filled(text: str, layer: int | None) -> str:
    """Fill a template with the number of its layer, as the page does."""
    if layer is None:
        return text
    marks = {"\x01": layer, "\x02": layer - 1, "\x03": layer + 1}
    return "".join(str(marks.get(mark, mark)) for mark in text)


def general(name: str, layer: int | None) -> str:
    """Return the template of a name, as the page makes it."""
    return name if layer is None else name.replace(f"l{layer}_", "l\x01_", 1)


def unfolded(
    recorder: StageRecorder, stage: int, text: Callable[[dict[str, Any]], str] | None = None
) -> list[tuple[str, str]]:
    """Return the section and the text of every line of a stage, in order, with layers repeated."""
    lines = []
    for title, first, last, body in recorder.stages[stage]["sections"]:
        for layer in [None] if first is None else range(first, last + 1):
            for line in recorder.bodies[body]:
                row = recorder.lines.rows[line]
                section = title if layer is None else f"layer {layer}"
                lines.append((section, filled((text or line_of)(row), layer)))
    return lines


def line_of(row: dict[str, Any]) -> str:
    """Return the text of a line with its origin, as the page's data have them."""
    module, file, number = row.get("origin", ["", "", 0])
    place = f"{file}:{number}" if file else ""
    origin = " ".join(filter(None, (module, place)))
    is_call = "rule" in row
    return f"{row['text']}  # {origin}" if is_call and origin else row["text"]


def fate(recorder: StageRecorder, stage: int, name: str, layer: int | None) -> list[str]:
    """Return what became of a value in a stage, as the page looks it up."""
    fates = recorder.stages[stage]["fates"]
    entry = fates.get(name) or fates.get(general(name, layer))
    return ["kept", name] if entry is None else [entry[0], filled(entry[1], layer)]
