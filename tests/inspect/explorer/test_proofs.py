"""What passes did to expressions, beside the expressions of the graphs themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx

from tests.inspect.explorer.recorded import MODELS, general, graph_of, recorded
from tpcompile.inspect.explorer.proofs import ProofRecorder
from tpcompile.ir.meta import captured_value, origin_of
from tpcompile.ir.values.value import Value
from tpcompile.passes import Stats, default_pipeline, run_passes
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.proving import Prover


def _entry(changes: dict[str, Any], node: fx.Node) -> dict[str, Any]:
    """Return what the page finds of a value."""
    template = general(node.name, origin_of(node).layer)
    entry: dict[str, Any] = changes.get(node.name) or (
        {} if node.name in changes else changes.get(template) or {}
    )
    return entry


@pytest.mark.parametrize("model", ["qwen3 tp=4", "qwen2 tp=3"])
def test_exactly_the_values_with_other_expressions_have_both(model: str) -> None:
    prover = Prover()
    stages = recorded(model).recorder.stages
    before: dict[str, Any] = {}
    wrong = []
    names = iter(range(len(stages)))

    def check(name: str, gm: fx.GraphModule, stats: Stats) -> None:
        changes = stages[next(names)]["changes"]
        values = prover.values_of(gm)
        assert values is not None
        now = dict(_bodies(gm, values.nodes))
        for node in gm.graph.nodes:
            meaning = captured_value(node)
            if meaning in now and meaning in before and node.op == "call_function":
                entry = _entry(changes, node)
                if bool(entry.get("terms")) != (before[meaning] is not now[meaning]):
                    wrong.append((name, node.name, entry))
        before.clear()
        before.update(now)

    tp = MODELS[model][1]
    run_passes(graph_of(model), default_pipeline(tp), [check], prover=prover)
    assert wrong == []


def _bodies(gm: fx.GraphModule, values: dict[fx.Node, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the expression of each captured value that a single node has."""
    nodes: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        meaning = captured_value(node)
        if meaning is not None and isinstance(values.get(node), Value):
            nodes.setdefault(meaning, []).append(node)
    for meaning, members in nodes.items():
        if len(members) == 1:
            yield meaning, values[members[0]].body


def test_rewrites_are_named_where_they_are_used() -> None:
    recorder = recorded("qwen3 tp=4").recorder
    used = {
        stage["name"]: {
            (name, rewrite)
            for name, entry in stage["changes"].items()
            for rewrite, _ in entry.get("rewrites", [])
        }
        for stage in recorder.stages
    }
    assert used["cache-kv"] == {("l\x01_attention", "without-past")}
    assert used["fuse-add-norm"] == {
        (name, "norm-before-rounding")
        for name in ("l\x01_add_rms_norm", "l\x01_add_rms_norm_1", "add_rms_norm")
    }
    assert ("l\x01_attention_reduce", "spans-merged") in used["split-attention"]
    assert not used["raise-norm"] and not used["shard-linears"]


def test_a_graph_without_expressions_has_no_changes() -> None:
    class Nothing(Prover):
        def values_of(self, gm: fx.GraphModule) -> None:
            return None

    gm = clone(graph_of("qwen3 tp=1"))
    recorder = ProofRecorder(Nothing())
    for _ in range(2):
        assert recorder.changes(gm, lambda node: (node.name, str)) == {}
