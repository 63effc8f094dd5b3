"""Tests of attention split into spans of blocks, and merged."""

from __future__ import annotations

import pytest
import torch

from tests.models import pair_of, relative_error, scaled_config
from tests.passes.decoding import BLOCK, decode_step, run_step, step_inputs, tables_for
from tests.passes.graphs import GraphBuilder
from tests.stages import stages_of
from tpcompile.errors import UsageError
from tpcompile.ir.meta import type_of
from tpcompile.ir.ops import ATTENTION_REDUCE, CACHED_ATTENTION, PARTIAL_ATTENTION
from tpcompile.ir.types import ValueType
from tpcompile.passes import parse_pipeline
from tpcompile.passes.cache_kv import CACHE
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.passes.split_attention import SplitAttention
from tpcompile.rewriting.rewrite import calls


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_every_attention(model: str) -> None:
    current = decode_step("split-attention", model).plain
    assert current.matches == 2
    gm = current.after.graph
    assert not calls(gm, CACHED_ATTENTION)
    assert len(calls(gm, PARTIAL_ATTENTION)) == len(calls(gm, ATTENTION_REDUCE)) == 2


@pytest.mark.parametrize("spans", [1, 2, 3, 7])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int, spans: int) -> None:
    """Numbers agree, also with more spans than blocks, where some spans are empty."""
    decode_step("split-attention", model, tp, spans).assert_near()


def test_partials_are_in_fp32_and_lie_as_the_heads_do() -> None:
    gm = decode_step("split-attention", tp=4, spans=7).after.graph
    for partial, reduced in zip(
        calls(gm, PARTIAL_ATTENTION), calls(gm, ATTENTION_REDUCE), strict=True
    ):
        kinds, whole = type_of(partial), type_of(reduced)
        assert isinstance(kinds, tuple) and isinstance(whole, ValueType)
        assert [kind.shape for kind in kinds] == [("T", 6, 7, 16), ("T", 6, 7)]
        assert {kind.dtype for kind in kinds} == {torch.float32}
        assert {kind.placement for kind in (*kinds, whole)} == {whole.placement}


@pytest.mark.parametrize("window", [1, 4, 6, 50])
def test_windows_are_kept(window: int) -> None:
    """Windows are preserved, also if they begin within a block or a span."""
    config = scaled_config(
        "qwen3-0.6b", sliding_window=window, use_sliding_window=True, max_window_layers=0
    )
    pair = pair_of(config)
    stages = stages_of(pair, decode_pipeline(2, 3, BLOCK))
    after = next(stage for stage in stages if stage.name == "split-attention").graph
    assert {node.args[5] for node in calls(after, PARTIAL_ATTENTION)} == {window}
    cached = next(stage for stage in stages if stage.name == "cache-kv").graph
    ids, tables = torch.arange(11) * 37, tables_for((11,))
    cache = next(node for node in cached.graph.nodes if node.name == CACHE)
    caches = [
        torch.full([n if isinstance(n, int) else 52 for n in kind.local_shape(rank)], torch.nan)
        for kind in [type_of(cache)]
        if isinstance(kind, ValueType)
        for rank in range(2)
    ]
    filled = run_step(cached, pair, step_inputs([ids[:-1]], [0], tables), {CACHE: caches}).kept
    logits = run_step(after, pair, step_inputs([ids[-1:]], [10], tables), filled).logits
    with torch.inference_mode():
        expected = pair.eager(ids[None]).logits[0, -1:]
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("spans", [0, -2])
def test_no_spans_mean_nothing(spans: int) -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "T", 4), "w", 4, 4))
    with pytest.raises(UsageError, match=f"spans must be at least 1, got {spans}"):
        SplitAttention(spans).apply(gm)
    assert SplitAttention(3).apply(gm).matches == 0


def test_how_many_spans_is_an_option() -> None:
    assert parse_pipeline("split-attention{spans=5}") == [SplitAttention(5)]
