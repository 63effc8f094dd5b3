"""Each stage has its own graph, which runs on simulated ranks and in plain torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import fx

from tests.models import (
    TOLERANCE,
    Pair,
    batch,
    eager_logits,
    preset_pair,
    relative_error,
    stage_logits,
)
from tests.passes.steps import STANDARD, TINY_VOCABULARY
from tests.stages import stages_of
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.pieces import evaluate
from tpcompile.ir.simulate import rank_inputs
from tpcompile.ir.text import format_graph
from tpcompile.passes import Stage, default_pipeline, run_passes

UNSHARDED = [
    *((1, name) for name in STANDARD),
    *((4, name) for name in STANDARD[: STANDARD.index("shard-linears")]),
]
"""All stages of one rank, and of more ranks the stages before shard-linears."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return preset_pair("tiny-qwen3")


@pytest.fixture(scope="module")
def stages(pair: Pair) -> list[Stage]:
    return run_passes(pair.captured.graph, default_pipeline(2))[1]


def test_stages_have_the_names_of_the_passes_and_their_text(stages: list[Stage]) -> None:
    assert [stage.name for stage in stages] == STANDARD
    texts = [stage.text_form for stage in stages]
    wanted = {"capture": "", "plan-sharding": "plan-sharding{tp=2}"}
    assert texts == [wanted.get(name, name) for name in STANDARD]


def test_stats_join_up(stages: list[Stage]) -> None:
    for before, after in pairwise(stages):
        assert after.stats.nodes_before == before.stats.nodes_after
        assert after.stats.nodes_after == len(after.graph.graph.nodes)
        assert after.stats.ms > 0
        assert after.stats.check_ms > 0


def test_the_last_stage_is_the_result(pair: Pair) -> None:
    gm, stages = run_passes(pair.captured.graph, default_pipeline(2))
    assert stages[-1].text() == format_graph(gm)
    assert stages[0].text() == format_graph(pair.captured.graph)


def test_changing_a_stage_changes_no_other(pair: Pair) -> None:
    gm, stages = run_passes(pair.captured.graph, default_pipeline(2))
    before = [stage.text() for stage in stages]
    result = format_graph(gm)
    changed = stages[10].graph
    output = next(node for node in changed.graph.nodes if node.op == "output")
    changed.graph.erase_node(output)
    for node in parameters(changed.graph):
        node.meta.clear()
    info_of(changed).plan = None
    info_of(changed).tp = 99
    unchanged = [text for place, text in enumerate(before) if place != 10]
    assert [stage.text() for place, stage in enumerate(stages) if place != 10] == unchanged
    assert format_graph(gm) == result
    assert info_of(gm).tp == 2
    again = run_passes(pair.captured.graph, default_pipeline(2))[1]
    assert [stage.text() for stage in again] == before


@pytest.mark.parametrize("name", STANDARD)
def test_a_stage_holds_its_parameters_shapes_but_no_numbers(name: str, stages: list[Stage]) -> None:
    gm = stages[STANDARD.index(name)].graph
    held = dict(gm.named_parameters())
    assert sorted(held) == sorted({str(node.target) for node in parameters(gm.graph)})
    for node in parameters(gm.graph):
        assert held[str(node.target)].is_meta
        assert tuple(held[str(node.target)].shape) == parameter_of(node).type.shape


def _bound(gm: fx.GraphModule, pair: Pair) -> fx.GraphModule:
    """Bind real, unsharded parameters to the stage's own module."""
    for node in parameters(gm.graph):
        value = evaluate(parameter_of(node).whole, pair.read)
        setattr(gm, str(node.target), torch.nn.Parameter(value, requires_grad=False))
    gm.rotary = pair.captured.rotary.fresh()
    return gm


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize(("tp", "name"), UNSHARDED)
def test_an_unsharded_stage_runs_as_plain_torch(model: str, tp: int, name: str) -> None:
    pair = preset_pair(model)
    stages = stages_of(pair, default_pipeline(tp)[: STANDARD.index(name)])
    assert stages[-1].name == name
    packed = batch((3, 1, 4), TINY_VOCABULARY)
    expected = stage_logits(stages[-1].graph, pair, packed)
    gm = _bound(stages[-1].graph, pair)
    inputs = rank_inputs(gm, packed.inputs())[0]
    with torch.inference_mode():
        logits = gm(*(inputs[node.name] for node in gm.graph.nodes if node.op == "placeholder"))
    if isinstance(logits, tuple | list):  # after greedy-head the tokens too
        logits, tokens = logits
        assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logits, expected)
    assert relative_error(logits, eager_logits(pair.eager, (3, 1, 4))) < TOLERANCE
