"""Stages: what became of each value, by an independent reading of two graphs."""

from __future__ import annotations

import pytest

from tests.inspect.explorer.recorded import (
    MODELS,
    Graph,
    fate,
    filled,
    general,
    recorded,
    unfolded,
    whole_step,
)
from tpcompile.inspect.explorer.stages import DROPPED, FUSED, REPLACED


def expected_fates(before: Graph, after: Graph) -> dict[str, tuple[str, set[str]]]:
    """Return the fate of each value, and the names that may be said with it.

    A value that is gone is replaced by a new one with the same meaning. Otherwise, it is fused into
    the new values with the meaning of a value that read it, directly or through others that are
    gone. Otherwise, it is dropped.
    """
    new = [node for key, node in after.items() if key not in before]
    gone = {key: node for key, node in before.items() if key not in after}
    heirs = {
        key: [heir for heir in new if heir.meanings & node.meanings] for key, node in gone.items()
    }
    reached = {key: {key} for key in gone}
    changed = True
    while changed:  # the transitive closure of "is read by" among values that are gone
        changed = False
        for key, node in gone.items():
            more = set().union(*(reached[user] for user in node.users if user in gone))
            changed |= not more <= reached[key]
            reached[key] |= more
    fates = {}
    for key, node in gone.items():
        into = {heir.name for other in reached[key] for heir in heirs[other]}
        if heirs[key]:
            same = all(
                not heir.is_parameter or heir.meanings == node.meanings for heir in heirs[key]
            )
            fates[node.name] = (REPLACED if same else FUSED, {heir.name for heir in heirs[key]})
        else:
            fates[node.name] = (FUSED, into) if into else (DROPPED, {""})
    return fates


def pairs(model: str) -> list[tuple[int, Graph, Graph]]:
    """Return each stage after the first with the graph before it and its own."""
    recording = recorded(model)
    graphs = recording.seen.graphs
    count = len(recording.prompt_stages)
    prompt = [(s, graphs[s - 1], graphs[s]) for s in range(1, count)]
    return prompt + [(s, graphs[s - 1], graphs[s]) for s in range(count + 1, len(graphs))]


@pytest.mark.parametrize("model", MODELS)
def test_fates_of_values_that_are_gone(model: str) -> None:
    kinds = set()
    for stage, before, after in pairs(model):
        wanted = expected_fates(before, after)
        layers = {node.name: node.layer for node in before.values()}
        for name, (kind, names) in wanted.items():
            actual, other = fate(recorded(model).recorder, stage, name, layers[name])
            assert (actual, other in names) == (kind, True), (stage, name, other, names)
            kinds.add(kind)
    assert kinds == {REPLACED, FUSED, DROPPED}


@pytest.mark.parametrize("model", MODELS)
def test_values_that_are_kept_have_no_fate(model: str) -> None:
    """Also if a value with the same name in another layer is gone."""
    for stage, before, after in pairs(model):
        for key, node in before.items():
            if key in after:
                actual = fate(recorded(model).recorder, stage, node.name, node.layer)
                assert actual == ["kept", node.name], (stage, actual)


@pytest.mark.parametrize("model", MODELS)
def test_a_kept_value_keeps_its_name(model: str) -> None:
    """The page follows a value that is kept under one name."""
    for _, before, after in pairs(model):
        assert all(after[key].name == node.name for key, node in before.items() if key in after)


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_decode_step_is_that_of_a_whole_run(model: str) -> None:
    recording, whole = recorded(model), whole_step(model)
    first = len(recording.prompt_stages)
    stages = [*range(recording.shared + 1), *range(first, len(recording.recorder.stages))]
    assert len(stages) == len(whole.stages)
    for mine, theirs in zip(stages, range(len(whole.stages)), strict=True):
        assert unfolded(recording.recorder, mine) == unfolded(whole, theirs)
        a, b = recording.recorder.stages[mine], whole.stages[theirs]
        for key in ("name", "tp", "matches", "nodes", "nearest", "fates", "needs"):
            assert a[key] == b[key], (a["name"], key)


@pytest.mark.parametrize("model", MODELS)
def test_needs_are_those_of_the_readers_of_the_stage(model: str) -> None:
    """The same collective has other readers after a fusion, and in another layer."""
    recording = recorded(model)
    several = set()
    for stage, graph in zip(recording.recorder.stages, recording.seen.graphs, strict=True):
        for node in graph.values():
            stored = stage["needs"].get(node.name)
            if stored is None:
                stored = stage["needs"].get(general(node.name, node.layer), [])
            needs = [{**need, "reader": filled(need["reader"], node.layer)} for need in stored]
            assert needs == list(node.needs), (stage["name"], node.name)
            if node.name == "embedding_sum":
                several.add(str(needs))
    assert len(several) > 1 or recording.tp == 1


def test_a_stage_says_what_its_pass_did() -> None:
    recording = recorded("qwen3 tp=4")
    for stage, graph, name in zip(
        recording.recorder.stages, recording.seen.graphs, recording.seen.names, strict=True
    ):
        assert (stage["name"], stage["nodes"]) == (name, len(graph))
        assert stage["ms"] >= 0 <= stage["check_ms"]
    matches = {stage["name"]: stage["matches"] for stage in recording.recorder.stages}
    assert (matches["capture"], matches["fuse-qkv"], matches["greedy-head"]) == (0, 4, 1)
    assert {stage["tp"] for stage in recording.recorder.stages} == {1, 4}
