"""Passes track which value of the captured graph each node computes."""

from __future__ import annotations

import pytest
import torch

from tests.models import TOLERANCE, Pair, batch, preset_pair, relative_error, run, whole
from tests.passes.steps import SEQUENCE_PARALLEL
from tests.passes.test_shard_linears import biased_llama
from tests.stages import stages_of
from tpcompile.ir.meta import captured_value, type_of
from tpcompile.ir.types import ValueType
from tpcompile.passes import default_pipeline, for_ranks, parse_pipeline

PIPELINES = {
    "standard": default_pipeline(3),
    "interleaved": default_pipeline(3, interleaved=True),
    "sequence-parallel": for_ranks(parse_pipeline(SEQUENCE_PARALLEL), 3),
}


def _pair(name: str) -> Pair:
    return biased_llama() if name == "biased llama" else preset_pair(name)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "biased llama"])
def test_every_value_of_every_stage_is_that_of_the_captured_node(name: str, pipeline: str) -> None:
    pair = _pair(name)
    packed = batch((2, 7), 1009)
    captured = run(pair.captured.graph, pair, packed)
    expected = {node.name: values[0] for node, values in captured.items()}
    stages = stages_of(pair, PIPELINES[pipeline])
    for stage in stages:
        outputs = run(stage.graph, pair, packed)
        compared = set()
        for node in stage.graph.graph.nodes:
            value = captured_value(node) if node.op != "output" else None
            if value is None or not isinstance(type_of(node), ValueType):
                continue
            actual = whole(node, outputs)
            target = expected[value]
            if target.dim() > actual.dim():
                target = target.squeeze(0)
            assert actual.shape == target.shape, (stage.name, node.name, value)
            if actual.is_floating_point():
                assert relative_error(actual, target) < TOLERANCE, (stage.name, node.name, value)
            else:
                assert torch.equal(actual, target)
            compared.add(value)
        layers = pair.captured.config.num_hidden_layers
        # interleaved queries and keys have no captured counterpart
        fewer = 6 if pipeline == "interleaved" else 0
        assert len(compared) >= (13 - fewer) * layers + 4, stage.name
