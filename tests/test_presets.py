"""Each dense preset at each tp from 2 to 8, in total 91 pairs, gives Hugging Face's logits."""

from __future__ import annotations

import pytest
import torch

from tests.models import (
    TOLERANCE,
    batch,
    eager_logits,
    padded,
    preset_pair,
    relative_error,
    stage_logits,
)
from tests.stages import graph_after, stages_of
from tpcompile.errors import ShardingError
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.presets import DENSE
from tpcompile.runtime.model import CompiledModel

BATCHES = ((1,), (2,), (33,), (1, 33, 17), (5, 2, 9))
"""Lengths of one and of three sequences, from 1 to 33 tokens."""


def test_there_are_91_pairs() -> None:
    assert len(DENSE) * len(range(2, 9)) == 91


@pytest.mark.parametrize("tp", range(2, 9))
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_eager(name: str, tp: int) -> None:
    pair = preset_pair(name)
    stages = stages_of(pair, default_pipeline(tp))
    graph = stages[-1].graph
    model = CompiledModel.simulated(pair.captured, graph, stages, pair.read)
    for lengths in BATCHES:
        ids, mask = padded(lengths)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        assert relative_error(logits, eager_logits(pair.eager, lengths)) < TOLERANCE, lengths
    for tensor, expected in pair.eager.named_parameters():
        assert torch.equal(model.gather_weight(tensor), expected), tensor


@pytest.mark.parametrize(("name", "heads"), [("qwen2.5-0.5b", 14), ("qwen3-1.7b", 16)])
def test_tp_up_to_the_query_heads(name: str, heads: int) -> None:
    """The largest tp has one query head per rank; one more rank is refused."""
    pair = preset_pair(name)
    graph = graph_after(pair, default_pipeline(heads))
    logits = stage_logits(graph, pair, batch((7, 3)))
    assert relative_error(logits, eager_logits(pair.eager, (7, 3))) < TOLERANCE
    with pytest.raises(ShardingError, match=f"{heads} query heads"):
        run_passes(pair.captured.graph, default_pipeline(heads + 1))
