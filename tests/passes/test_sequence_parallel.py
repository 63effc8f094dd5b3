"""Each rank normalises only its own tokens, if any; the logits keep their bits."""

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
    run,
    stage_logits,
)
from tests.passes.graphs import attention_graph
from tests.passes.steps import SEQUENCE_PARALLEL, TINY_VOCABULARY, step
from tests.passes.test_shard_linears import biased_llama
from tests.stages import graph_after, stages_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ADD_RMS_NORM, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, RMS_NORM
from tpcompile.passes import default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.sequence_parallel import SequenceParallel
from tpcompile.rewriting.rewrite import calls
from tpcompile.runtime.model import CompiledModel

BATCHES = ((1,), (2,), (3,), (9,), (2, 1, 4))
"""The first batches have fewer tokens than four ranks, so that some ranks have none."""


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_every_sum(model: str) -> None:
    done = step("sequence-parallel", model, pipeline=SEQUENCE_PARALLEL)
    assert done.matches == 2 * 2 + 1
    assert not calls(done.after.graph, ALL_REDUCE)
    assert len(calls(done.after.graph, REDUCE_SCATTER)) == 2 * 2 + 1


def test_one_rank_keeps_all_tokens() -> None:
    assert step("sequence-parallel", tp=1, pipeline=SEQUENCE_PARALLEL).matches == 0


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_the_whole_pipeline_gives_the_bits_of_the_plain_one(model: str, tp: int) -> None:
    pair = preset_pair(model)
    plain = graph_after(pair, default_pipeline(tp))
    passes = for_ranks(parse_pipeline(SEQUENCE_PARALLEL), tp)
    stages = stages_of(pair, passes)
    gm = stages[-1].graph
    emitted = CompiledModel.simulated(pair.captured, gm, stages, pair.read)
    for lengths in BATCHES:
        packed = batch(lengths, TINY_VOCABULARY)
        simulated = stage_logits(gm, pair, packed)
        assert torch.equal(simulated, stage_logits(plain, pair, packed)), lengths
        assert relative_error(simulated, eager_logits(pair.eager, lengths)) < TOLERANCE, lengths
        ids, mask = padded(lengths, TINY_VOCABULARY)
        logits = emitted(ids, attention_mask=mask).logits[mask.bool()]
        assert relative_error(logits, eager_logits(pair.eager, lengths)) < TOLERANCE, lengths


def test_a_rank_without_tokens_holds_none() -> None:
    """A single token on four ranks is on the last; the other ranks have empty values."""
    pair = preset_pair("tiny-qwen3")
    gm = graph_after(pair, for_ranks(parse_pipeline(SEQUENCE_PARALLEL), 4))
    values = run(gm, pair, batch((1,), TINY_VOCABULARY))
    for node in calls(gm, REDUCE_SCATTER):
        assert [len(value) for value in values[node]] == [0, 0, 0, 1]


def test_only_norms_between_the_linears_are_split_by_tokens() -> None:
    gm = step("fuse-add-norm", pipeline=SEQUENCE_PARALLEL).after.graph
    for node in calls(gm, ADD_RMS_NORM):
        for kind in node.meta["type"]:
            assert kind.layout_of(0) == TokenLayout(4)
    per_head = [node for node in calls(gm, RMS_NORM) if value_type(node).dims == 3]
    assert len(per_head) == 2 * 2
    for node in per_head:
        assert value_type(node).layout_of(0) is None
    logits = calls(gm, ALL_GATHER)[-1]
    assert value_type(logits).shape == ("R", TINY_VOCABULARY)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_row_parallel_bias_is_added_to_each_token_once(tp: int) -> None:
    pair = biased_llama()
    passes = for_ranks(parse_pipeline(SEQUENCE_PARALLEL), tp)
    gm = graph_after(pair, passes)
    for lengths in ((1,), (4, 3)):
        logits = stage_logits(gm, pair, batch(lengths))
        assert relative_error(logits, eager_logits(pair.eager, lengths)) < TOLERANCE


def test_a_residual_that_every_rank_holds_stays_whole() -> None:
    """Without vocab-parallel the embedding is replicated; layer 0 gathers, with the same bits."""
    pair, packed = preset_pair("tiny-qwen3"), batch((3, 8), 1013)
    whole = SEQUENCE_PARALLEL.replace("vocab-parallel,", "")
    plain = whole.replace("sequence-parallel,", "")
    actual, expected = (
        stage_logits(graph_after(pair, passes), pair, packed)
        for passes in (for_ranks(parse_pipeline(text), 3) for text in (whole, plain))
    )
    assert torch.equal(actual, expected)


def test_a_graph_without_sums_is_left_alone() -> None:
    assert SequenceParallel().apply(attention_graph()).matches == 0


def test_collectives_that_are_not_chosen_yet_are_named() -> None:
    graph = preset_pair("tiny-qwen3").captured.graph
    passes = [current for current in default_pipeline(2) if current.name != "insert-collectives"]
    until = [current.name for current in passes].index("fuse-qkv")
    _, stages = run_passes(graph, [*passes[:until], SequenceParallel()])
    stats = stages[-1].stats
    assert stats.matches == 0
    assert "the collective of this redistribute is not chosen yet" in stats.nearest
