"""Information about a graph as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tpcompile.ir.plan import Plan
from tpcompile.ir.types import ValueType


@dataclass(frozen=True)
class RotarySource:
    """The class of transformers that computes the rotary tables, and its configuration as JSON."""

    path: str
    config: str


@dataclass
class GraphInfo:
    """The model of a graph, its ranks and its results."""

    name: str
    tp: int
    outputs: tuple[ValueType, ...]
    plan: Plan | None = None
    """The plan, which the pass `plan-sharding` sets and later passes read."""
    biases: frozenset[tuple[str, str]] = frozenset()
    """The (bias, weight) pairs of tensor names in the captured model."""
    model: str = "the model"
    """The class name of the captured model, for messages."""
    rotary: RotarySource | None = None
    """The source of the rotary tables; None if their class is not part of transformers."""


def info_of(gm: fx.GraphModule) -> GraphInfo:
    info = gm.meta["tpcompile"]
    assert isinstance(info, GraphInfo)
    return info


def model_of(graph: fx.Graph) -> str:
    """Return the class name of the model that a graph was captured from, for messages."""
    owner = graph.owning_module
    return info_of(owner).model if owner is not None and "tpcompile" in owner.meta else "the model"
