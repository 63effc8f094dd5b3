"""How mistakes are detected: by the checker, or by numbers that differ from Hugging Face's."""

from __future__ import annotations

from typing import Any

from torch import fx

from tests.models import (
    TOLERANCE,
    Pair,
    batch,
    eager_logits,
    relative_error,
    stage_logits,
)
from tests.stages import graph_after
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import (
    operand,
    parameter_of,
    parameters,
)
from tpcompile.passes import default_pipeline

LENGTHS = (5, 1, 9)
VISIBLE = 10 * TOLERANCE
"""A mistake must change the logits at least ten times as much as rounding may.

The smallest effect is that of a bias of keys: softmax cancels any term common to all keys, and
only the rotation makes the bias differ between keys.
"""


def lowered(pair: Pair, tp: int, until: str = "") -> fx.GraphModule:
    """Return the graph after the standard passes, or after a prefix of them."""
    passes = default_pipeline(tp)
    names = [current.name for current in passes]
    last = names.index(until) + 1 if until else len(names)
    return graph_after(pair, passes[:last])


def error_of(gm: fx.GraphModule, pair: Pair, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Return the relative error of the logits."""
    packed = batch(lengths, pair.captured.config.vocab_size)
    return relative_error(stage_logits(gm, pair, packed), eager_logits(pair.eager, lengths))


def rules_broken(gm: fx.GraphModule) -> set[str]:
    return {problem.rule for problem in check_graph(gm)}


def assert_good(gm: fx.GraphModule, pair: Pair) -> None:
    assert rules_broken(gm) == set()
    assert error_of(gm, pair) < TOLERANCE


def called(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def made_of(gm: fx.GraphModule, tensor: str) -> fx.Node:
    return next(node for node in parameters(gm.graph) if tensor in parameter_of(node).describe())


def bypass(node: fx.Node) -> None:
    """Replace a node by its first operand."""
    node.replace_all_uses_with(operand(node))
    node.graph.erase_node(node)
