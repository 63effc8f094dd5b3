"""Trap 10 put back piece by piece: each mistake changes the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from tests.models import TOLERANCE, batch, eager_logits, relative_error, stage_logits
from tests.passes.steps import TINY_VOCABULARY
from tests.passes.test_interleave_rotary import LENGTHS, interleaved
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand, parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ATTENTION, ROPE
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls


def _weights(side: int, gm: fx.GraphModule) -> list[fx.Node]:
    """Return the projection, bias and norm of queries (0) or keys (1) in the first layer."""
    node = operand(calls(gm, ATTENTION)[0], side)
    weights: list[fx.Node] = []
    while node.op == "call_function" and not (weights and weights[-1].name.endswith("proj_weight")):
        weights += [n for n in reversed(node.all_input_nodes) if n.op == "get_attr"]
        node = operand(node)
    return weights


def _undo(gm: fx.GraphModule, plain: fx.GraphModule, ending: str, *sides: int) -> None:
    before = {node.name: parameter_of(node) for node in parameters(plain.graph)}
    undone = [n for s in sides for n in _weights(s, gm) if n.name.endswith(ending)]
    assert undone
    for node in undone:
        set_parameter(node, before[node.name])


def _norms(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    _undo(gm, plain, "norm_weight", 0, 1)


def _one_norm(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    _undo(gm, plain, "norm_weight", 1)


def _biases(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    _undo(gm, plain, "bias", 0, 1)


def _rows(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    _undo(gm, plain, "proj_weight", 0, 1)


def _only_queries(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    """Restore Hugging Face's order for keys: weights and rotation."""
    _undo(gm, plain, "", 1)
    rotated = operand(calls(gm, ATTENTION)[0], 1)
    rotated.args = rotated.args[:3]


def _only_weights(gm: fx.GraphModule, plain: fx.GraphModule) -> None:
    for node in calls(gm, ROPE):
        node.args = node.args[:3]


MISTAKES: dict[str, tuple[str, Callable[[fx.GraphModule, fx.GraphModule], None]]] = {
    "norms are not permuted": ("tiny-qwen3", _norms),
    "the norm of keys is not permuted": ("tiny-qwen3", _one_norm),
    "biases are not permuted": ("tiny-qwen2", _biases),
    "rows are not permuted": ("tiny-qwen3", _rows),
    "only queries are permuted": ("tiny-qwen2", _only_queries),
    "only queries with norms are permuted": ("tiny-qwen3", _only_queries),
    "halves are rotated": ("tiny-qwen2", _only_weights),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str) -> None:
    model, put_back = MISTAKES[name]
    current, packed = interleaved(model), batch(LENGTHS, TINY_VOCABULARY)
    gm = clone(current.after.graph)
    put_back(gm, current.before.graph)
    logits = stage_logits(gm, current.pair, packed)
    assert relative_error(logits, eager_logits(current.pair.eager, LENGTHS)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", MISTAKES)
def test_the_checker_names_the_order(name: str) -> None:
    model, put_back = MISTAKES[name]
    current = interleaved(model)
    gm = clone(current.after.graph)
    assert check_graph(gm) == []
    put_back(gm, current.before.graph)
    assert check_graph(gm)[0].rule == "head-order"
