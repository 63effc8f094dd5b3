"""The compilation on the page, and the same compilation computed apart from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx
from transformers import AutoConfig

from tests.captures import captured_once
from tests.inspect.explorer.recorded import Snapshots
from tpcompile.exploring import Exploration, explore
from tpcompile.ir.text.printer import Printer, section_of
from tpcompile.passes import Stage, Stats, decode_pipeline, default_pipeline, run_passes
from tpcompile.presets import preset

TP = 4
LAYERS = 3
VALUES = {**preset("tiny-qwen3"), "num_hidden_layers": LAYERS}


def config() -> Any:
    model_config = AutoConfig.for_model(**VALUES)
    model_config.name_or_path = "three layers"
    return model_config


def explored() -> Exploration:
    """Collect the data of the page that most tests read."""
    return explore(
        config(), TP, beside=[(2, None)], target="cpu", workers=3, compare=True, random_weights=0
    )


@dataclass
class Lines:
    """An instrument that stores the lines of each stage: by name, without origins."""

    stages: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """The section and the line of each value, by the name of the pass and that of the value."""

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        printer = Printer(origins=False)
        self.stages[name] = {n.name: (section_of(n), printer.node(n)) for n in gm.graph.nodes}


class Truth:
    """The compilation of the page's model, computed by the compiler alone."""

    def __init__(self) -> None:
        self.lines, self.seen = Lines(), Snapshots()
        self.graph: fx.GraphModule
        self.stages: list[Stage]
        self.graph, self.stages = run_passes(
            captured_once(config()).graph, default_pipeline(TP), [self.lines, self.seen]
        )

    @cached_property
    def step(self) -> fx.GraphModule:
        """The graph of the decode step."""
        return run_passes(captured_once(config()).graph, decode_pipeline(TP))[0]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The nodes of the last stage of the prompt pipeline, by name."""
        return {node.name: node for node in self.graph.graph.nodes}

    def graph_after(self, name: str) -> fx.GraphModule:
        """Return the graph after a pass."""
        return next(stage for stage in self.stages if stage.name == name).graph
