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
        key: [one for one in new if one.meanings & node.meanings] for key, node in gone.items()
    }
    reached = {key: {key} for key in gone}
    changed = True
    while changed:  # the transitive closure of "is read by" among values that are gone
        changed = False
        for key, node in gone.items():
            more = set().union(*(reached[user] for user in node.users if user in gone))
            changed |= not more <= reached[key]
            reached[key] |= more
    found = {}
    for key, node in gone.items():
        into = {one.name for other in reached[key] for one in heirs[other]}
        if heirs[key]:
            same = all(not one.is_parameter or one.meanings == node.meanings for one in heirs[key])
            found[node.name] = (REPLACED if same else FUSED, {one.name for one in heirs[key]})
        else:
            found[node.name] = (FUSED, into) if into else (DROPPED, {""})
    return found


def pairs(model: str) -> list[tuple[int, Graph, Graph]]:
    """Return each stage after the first with the graph before it and its own."""
    one = recorded(model)
    graphs = one.seen.graphs
    own = len(one.prompt_stages)
    prompt = [(s, graphs[s - 1], graphs[s]) for s in range(1, own)]
    return prompt + [(s, graphs[s - 1], graphs[s]) for s in range(own + 1, len(graphs))]


@pytest.mark.parametrize("model", MODELS)
def test_fates_of_values_that_are_gone(model: str) -> None:
    kinds = set()
    for stage, before, after in pairs(model):
        wanted = expected_fates(before, after)
        layers = {node.name: node.layer for node in before.values()}
        for name, (kind, names) in wanted.items():
            found, other = fate(recorded(model).recorder, stage, name, layers[name])
            assert (found, other in names) == (kind, True), (stage, name, other, names)
            kinds.add(kind)
    assert kinds == {REPLACED, FUSED, DROPPED}


@pytest.mark.parametrize("model", MODELS)
def test_values_that_are_kept_have_no_fate(model: str) -> None:
    """Also if a value with the same name in another layer is gone."""
    for stage, before, after in pairs(model):
        for key, node in before.items():
            if key in after:
                found = fate(recorded(model).recorder, stage, node.name, node.layer)
                assert found == ["kept", node.name], (stage, found)


@pytest.mark.parametrize("model", MODELS)
def test_a_kept_value_keeps_its_name(model: str) -> None:
    """The page follows a value that is kept under one name."""
    for _, before, after in pairs(model):
        assert all(after[key].name == node.name for key, node in before.items() if key in after)


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_decode_step_is_that_of_a_whole_run(model: str) -> None:
    one, whole = recorded(model), whole_step(model)
    first = len(one.prompt_stages)
    stages = [*range(one.shared + 1), *range(first, len(one.recorder.stages))]
    assert len(stages) == len(whole.stages)
    for mine, theirs in zip(stages, range(len(whole.stages)), strict=True):
        assert unfolded(one.recorder, mine) == unfolded(whole, theirs)
        a, b = one.recorder.stages[mine], whole.stages[theirs]
        for key in ("name", "tp", "matches", "nodes", "nearest", "fates", "needs"):
            assert a[key] == b[key], (a["name"], key)


@pytest.mark.parametrize("model", MODELS)
def test_needs_are_those_of_the_readers_of_the_stage(model: str) -> None:
    """The same collective has other readers after a fusion, and in another layer."""
    one = recorded(model)
    several = set()
    for stage, graph in zip(one.recorder.stages, one.seen.graphs, strict=True):
        for node in graph.values():
            found = stage["needs"].get(node.name)
            if found is None:
                found = stage["needs"].get(general(node.name, node.layer), [])
            needs = [{**need, "reader": filled(need["reader"], node.layer)} for need in found]
            assert needs == list(node.needs), (stage["name"], node.name)
            if node.name == "embedding_sum":
                several.add(str(needs))
    assert len(several) > 1 or one.tp == 1


def test_a_stage_says_what_its_pass_did() -> None:
    one = recorded("qwen3 tp=4")
    for stage, graph, name in zip(
        one.recorder.stages, one.seen.graphs, one.seen.names, strict=True
    ):
        assert (stage["name"], stage["nodes"]) == (name, len(graph))
        assert stage["ms"] >= 0 <= stage["check_ms"]
    matches = {stage["name"]: stage["matches"] for stage in one.recorder.stages}
    assert (matches["capture"], matches["fuse-qkv"], matches["greedy-head"]) == (0, 4, 1)
    assert {stage["tp"] for stage in one.recorder.stages} == {1, 4}
